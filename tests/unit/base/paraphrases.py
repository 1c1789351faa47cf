"""Questions, each with a light and a heavy rewording, and with another question of the same mould.

Light keeps most words (order, a synonym, politeness); heavy says the same in other words. Written by hand, once, before
the threshold was chosen on text-to-SQL tasks; the measured recall stands in docs/evaluation.md.
"""

from typing import NamedTuple


class Reworded(NamedTuple):
    """One question in three wordings, and a different question that looks like it."""

    original: str
    light: str
    heavy: str
    other: str


QUESTIONS = (
    Reworded(
        "Which rivers run through Texas and are longer than 500 kilometres?",
        "Which rivers longer than 500 kilometres run through Texas?",
        "Name every Texan waterway whose length exceeds 500 km.",
        "Which rivers run through Ohio and are longer than 700 kilometres?",
    ),
    Reworded(
        "How many employees joined the Berlin office after March 2021?",
        "After March 2021, how many employees joined the office in Berlin?",
        "Give the number of people hired in Berlin since spring 2021.",
        "How many employees joined the Madrid office after June 2020?",
    ),
    Reworded(
        "Cancel the order of customer 4471 and refund the shipping costs.",
        "Please cancel the order of customer 4471 and also refund shipping costs.",
        "Customer 4471 wants the purchase annulled and the postage paid back.",
        "Cancel the order of customer 9023 and refund the gift wrapping.",
    ),
    Reworded(
        "What is the boiling point of ethanol at a pressure of 2 bar?",
        "At a pressure of 2 bar, what is ethanol's boiling point?",
        "Under 2 bar, at which temperature does ethanol start to boil?",
        "What is the melting point of glycerol at a pressure of 5 bar?",
    ),
    Reworded(
        "Write a function that merges two sorted lists without recursion.",
        "Write a function which merges two sorted lists without using recursion.",
        "Combine a pair of ordered sequences iteratively in one routine.",
        "Write a function that rotates two square matrices without copying.",
    ),
    Reworded(
        "Book a table for six people at the Golden Lotus on Friday at 19:30.",
        "Book a table at the Golden Lotus on Friday at 19:30 for six people.",
        "Reserve seats for half a dozen guests at Golden Lotus, Friday evening 19:30.",
        "Book a table for two people at the Blue Heron on Sunday at 12:15.",
    ),
    Reworded(
        "Summarise the quarterly report of Nordwind Energy in three sentences.",
        "In three sentences, summarise Nordwind Energy's quarterly report.",
        "Condense what Nordwind Energy told investors last quarter into a few lines.",
        "Summarise the annual letter of Harbour Shipping in ten sentences.",
    ),
    Reworded(
        "Find the cheapest direct flight from Lisbon to Oslo next Tuesday.",
        "Find the cheapest flight, direct, from Lisbon to Oslo on next Tuesday.",
        "I need to fly nonstop Lisbon to Oslo on Tuesday for as little as possible.",
        "Find the fastest direct train from Vienna to Prague next Thursday.",
    ),
    Reworded(
        "Who painted the ceiling of the chapel and in which year was it finished?",
        "In which year was the ceiling of the chapel finished and who painted it?",
        "Tell me the artist behind the chapel's ceiling and its completion date.",
        "Who carved the doors of the cathedral and in which century was it burned?",
    ),
    Reworded(
        "List all patients with a potassium value above 5.5 who take spironolactone.",
        "List all the patients who take spironolactone with a potassium value above 5.5.",
        "Show everyone on spironolactone whose potassium exceeds 5.5.",
        "List all patients with a sodium value above 145 who take furosemide.",
    ),
    Reworded(
        "Translate the error message of the payment service into plain French.",
        "Translate the payment service's error message into plain French.",
        "Put what the payment service complains about into simple French.",
        "Translate the welcome banner of the booking portal into plain Dutch.",
    ),
    Reworded(
        "Rename the column created_on to created_at in the table invoices.",
        "In the table invoices, rename the column created_on to created_at.",
        "The invoices table should call its created_on field created_at from now on.",
        "Rename the column owner_id to holder_id in the table accounts.",
    ),
    Reworded(
        "How far is the nearest pharmacy that is open on Sunday from Elm Street 12?",
        "From Elm Street 12, how far is the nearest pharmacy open on Sunday?",
        "Distance between Elm Street 12 and the closest drugstore open Sundays?",
        "How far is the nearest garage that is open on Monday from Oak Avenue 90?",
    ),
    Reworded(
        "Compute the monthly payment of a loan of 240000 at 3.1 percent over 25 years.",
        "Compute a loan's monthly payment: 240000 at 3.1 percent over 25 years.",
        "Borrowing 240000 for 25 years at 3.1 percent, what is due each month?",
        "Compute the monthly payment of a lease of 18000 at 4.9 percent over 4 years.",
    ),
    Reworded(
        "Delete every branch that was merged into main more than 90 days ago.",
        "Delete all branches which were merged into main more than 90 days ago.",
        "Clean up branches whose merge into main happened over 90 days back.",
        "Archive every ticket that was moved into review more than 30 days ago.",
    ),
    Reworded(
        "Which supplier delivered the most screws to the Rotterdam warehouse in 2019?",
        "Which supplier delivered most screws in 2019 to the Rotterdam warehouse?",
        "In 2019, who was the top source of screws for the depot in Rotterdam?",
        "Which supplier delivered the fewest bolts to the Antwerp warehouse in 2022?",
    ),
    Reworded(
        "Explain why the cache misses when the tenant header is upper case.",
        "Explain why the cache misses if the tenant header is in upper case.",
        "What makes capitalised tenant headers bypass the cache?",
        "Explain why the proxy retries when the session cookie is too long.",
    ),
    Reworded(
        "Add a unit test for the parser that covers nested brackets and comments.",
        "Add a unit test covering nested brackets and comments for the parser.",
        "The parser lacks a test with comments inside brackets within brackets; write it.",
        "Add a load test for the scheduler that covers expired leases and restarts.",
    ),
    Reworded(
        "What did the council decide about the cycle path along the old canal?",
        "What did the council decide on the cycle path along the old canal?",
        "How did the council rule concerning a bike lane beside the old canal?",
        "What did the ministry announce about the toll road across the new bridge?",
    ),
    Reworded(
        "Convert 72 degrees Fahrenheit to Celsius and round to one decimal.",
        "Convert 72 degrees Fahrenheit into Celsius, rounded to one decimal.",
        "72 Fahrenheit is how many degrees Celsius, with a single decimal?",
        "Convert 15 nautical miles to kilometres and round to two decimals.",
    ),
)
