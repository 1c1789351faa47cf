"""Your agent. It knows nothing of Leyden: it reads a question, asks a model, and prints an answer."""

import os

from openai import OpenAI

client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY come from the environment
answer = client.chat.completions.create(
    model="main",
    messages=[
        {"role": "system", "content": "Answer with one number only."},
        {"role": "user", "content": os.environ["QUESTION"]},
    ],
    max_tokens=8,
)
print(answer.choices[0].message.content)
