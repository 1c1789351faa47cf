// The `openai` package of npm: a loop with one tool, streamed.

import OpenAI from "openai";

const client = new OpenAI();
const tools: OpenAI.Chat.Completions.ChatCompletionTool[] = [{
  type: "function",
  function: {
    name: "add",
    description: "Add two whole numbers.",
    parameters: { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } },
  },
}];
const messages: OpenAI.Chat.Completions.ChatCompletionMessageParam[] = [
  { role: "system", content: "Use the tool to add numbers." },
  { role: "user", content: process.env.QUESTION! },
];
for (let turn = 0; turn < 4; turn++) {
  const stream = client.chat.completions.stream({ model: "main", messages, tools });
  const message = (await stream.finalChatCompletion()).choices[0].message;
  messages.push(message);
  if (!message.tool_calls?.length) {
    console.log(message.content);
    break;
  }
  for (const call of message.tool_calls) {
    if (call.type !== "function") continue;
    const { a, b } = JSON.parse(call.function.arguments);
    messages.push({ role: "tool", tool_call_id: call.id, content: String(a + b) });
  }
}
