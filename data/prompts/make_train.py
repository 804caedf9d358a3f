"""Write train.jsonl: original, diverse prompts in six categories (FastChat layout).

Deterministic: every draw comes from one seeded generator per category.  Text blocks hold one
entry a line; a line that starts with two spaces continues the entry above it.  In an entry,
``{slot}`` draws a filler, ``{slot1}`` draws one and remembers it, ``{n:2-9}`` draws a number and
remembers it, ``{=n*m+k}`` is a sum of products, and ``[a|b]`` picks one wording.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

SEED = 20240611
PER_CATEGORY = 500
MAX_WORDS = 500
OUT = Path(__file__).with_name("train.jsonl")


def block(text: str) -> list[str]:
    """Split a text block into entries, joining continuation lines."""
    entries: list[str] = []
    for line in text.strip("\n").split("\n"):
        if line.startswith("  ") and entries:
            entries[-1] += " " + line.strip()
        elif line.strip():
            entries.append(line.strip())
    return entries


def words(text: str) -> list[str]:
    """Split a comma-separated filler list."""
    return [w.strip() for w in " ".join(text.split()).split(",") if w.strip()]


SLOTS: dict[str, list[str]] = {
    "name": words("""
Amara, Ben, Chloe, Diego, Elena, Farid, Grace, Hiro, Imani, Jonas, Kavya, Liam, Mei, Noor, Oscar,
  Priya, Quinn, Rosa, Samir, Tessa, Umar, Vera, Wes, Ximena, Yusuf, Zoe, Anders, Bianca, Caleb,
  Dina, Emil, Fiona, Gideon, Hana, Ivan, Jada, Kofi, Lena, Marco, Nadia, Otto, Paloma, Rafael,
  Sofia, Tariq, Una, Victor, Willa, Yara, Zane, Aisha, Bruno, Cora, Dmitri, Esme, Felix, Greta,
  Hugo, Iris, Joel
"""),
    "surname": words("""
Abbott, Banerjee, Castellano, Dufresne, Eriksen, Fontaine, Gallagher, Hadley, Ibarra, Jansen,
  Kowalski, Lindqvist, Moreau, Nakamura, Okafor, Pemberton, Quigley, Rosales, Stavros, Thackeray,
  Underhill, Vasquez, Whitlock, Yamada, Zielinski, Adeyemi, Bergstrom, Chowdhury, Delgado,
  Eastman, Ferreira, Grigson, Holloway, Ivanova, Jeffers, Kaplan, Lombardi, Mbeki, Norwood,
  Ostrander
"""),
    "town": words("""
Ashford Bay, Brindle Hill, Carrow, Dunmore, Eastvale, Fernleigh, Glenhaven, Harrowgate, Inverlea,
  Juniper Falls, Kestrel Point, Larkspur, Millbrook, Northwick, Oakridge, Pinecrest, Quarry Hill,
  Redmarsh, Silverton, Thornbury, Upland Park, Valmere, Westbridge, Yarrow, Zephyr Cove, Amberley,
  Birchwood, Copperfield, Dovecote, Elmstead, Foxley, Greywater, Hollins, Ivybridge, Kingsmere,
  Lowther, Marlow Sands, Netherby, Oldcastle, Port Selwyn
"""),
    "things": words("""
notebooks, marbles, stickers, pencils, beads, tulips, candles, postcards, seashells, buttons,
  balloons, magnets, erasers, comic books, toy cars, trading cards, bracelets, mugs, bookmarks,
  puzzles, badges, coins, ribbons, jars of honey, muffins, cupcakes, oranges, pears, lemons,
  plums, eggs, sandwiches, bagels, cookies, water bottles, light bulbs, seed packets, tennis
  balls, baseball caps, socks, paint tubes, kites, keychains, lanterns
"""),
    "job": words("""
nurse, carpenter, teacher, electrician, librarian, chef, plumber, graphic designer, farmer, bus
  driver, accountant, photographer, veterinarian, lifeguard, baker, florist, journalist, mechanic,
  software engineer, architect, dentist, tailor, pharmacist, translator, museum guide, security
  guard, sales clerk, barista, wedding planner, music teacher, firefighter, pilot, park ranger,
  physiotherapist, hairdresser, civil engineer, social worker, optician, gardener, receptionist
"""),
    "topic": words("""
renewable energy, remote work, the water cycle, photosynthesis, public libraries, sleep,
  inflation, honeybees, volcanoes, machine learning, urban gardening, the immune system, chess,
  black holes, meditation, plate tectonics, recycling, the printing press, coral reefs, online
  privacy, electric cars, time management, antibiotics, the stock market, jazz music, democracy,
  vaccines, tides, composting, public speaking, the ozone layer, supply and demand, gravity, the
  Silk Road, fermentation, minimalism, sleepwalking, airports, solar eclipses, credit scores,
  blockchain, glaciers, migration of birds, earthquakes, cloud computing, the French Revolution,
  sourdough bread, tea, cycling to work, video games, mindfulness, ancient Rome, encryption, food
  waste, standardized testing, satellites, probability, the human heart
"""),
    "thing": words("""
backpack, coffee maker, bicycle, umbrella, desk lamp, raincoat, tent, water bottle, alarm clock,
  guitar, pair of running shoes, cookbook, houseplant, telescope, wooden table, fitness tracker,
  notebook, board game, winter scarf, electric kettle, toothbrush, lunch box, garden hose, camera,
  sleeping bag, mirror, bookshelf, candle, rice cooker, wallet, keyboard, skateboard, hammock,
  picture frame, blender, suitcase, pocket knife, office chair, piano, vacuum cleaner
"""),
    "animal": words("""
owl, fox, turtle, elephant, hedgehog, raven, whale, squirrel, penguin, lizard, dolphin, rabbit,
  donkey, tiger, crab, otter, bee, goat, wolf, swan, parrot, mole, camel, octopus, sparrow, moose,
  badger, snail, mouse, crow, frog, lynx, beaver, pelican, bat, salmon, cricket, giraffe, sloth,
  heron
"""),
    "hobby": words("""
knitting, birdwatching, rock climbing, baking bread, playing the guitar, running, chess, painting
  with watercolours, gardening, photography, learning Spanish, swimming, pottery, stargazing,
  woodworking, yoga, hiking, collecting stamps, cooking Indian food, sewing, journaling, playing
  tennis, juggling, origami, kayaking, calligraphy, fishing, home brewing, dancing salsa, writing
  poetry, cycling, building model trains, singing in a choir, learning the piano, skateboarding,
  candle making, archery, magic tricks, geocaching, volunteering
"""),
    "place": words("""
lighthouse, train station, abandoned theatre, mountain village, desert market, submarine, library
  basement, space station, bakery, rainforest, castle kitchen, snowy cabin, fishing harbour, old
  bookshop, roof garden, clock tower, night bus, island hotel, circus tent, hospital waiting room,
  vineyard, mining town, botanical garden, school attic, airport lounge, haunted mill, riverboat,
  observatory, underground city, orchard, laundromat, monastery, racetrack, treehouse, museum
  after dark, frozen lake, toy shop, ferry, quiet suburb, concert hall
"""),
    "feeling": words("""
joy, regret, curiosity, loneliness, hope, jealousy, pride, relief, fear, gratitude, nostalgia,
  boredom, courage, confusion, patience, wonder, guilt, determination, calm, surprise
"""),
    "audience": words("""
a five-year-old, a high school student, a busy manager, my grandmother, a complete beginner, a
  curious teenager, someone who hates science, a group of tourists, a new employee, a college
  freshman, an English learner, a sceptical friend
"""),
    "country": words("""
France, Japan, Brazil, Kenya, Canada, Egypt, India, Peru, Norway, Thailand, Mexico, Australia,
  Greece, Morocco, Poland, Vietnam, Chile, South Africa, Turkey, Portugal, Iceland, Argentina,
  Indonesia, Nigeria, Spain, Finland, Mongolia, New Zealand, Cuba, Ireland, Austria, Ethiopia,
  Colombia, Nepal, Hungary, Jordan, Malaysia, Ghana, Denmark, Luxembourg, Ukraine, the
  Philippines, Romania, Belgium, Uruguay, Pakistan, Saudi Arabia, Kazakhstan, Bolivia, Croatia
"""),
    "month": words("""
January, February, March, April, May, June, July, August, September, October, November, December
"""),
    "day": words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"),
    "tone": words("""
formal, friendly, humorous, polite, enthusiastic, serious, sarcastic, simple, professional,
  poetic, persuasive, casual, apologetic, confident, warm, dramatic
"""),
    "dish": words("""
vegetable soup, pancakes, lentil curry, roast chicken, fried rice, banana bread, tomato pasta,
  omelette, fish tacos, potato salad, apple pie, mushroom risotto, chili, guacamole, ramen, pizza
  dough, hummus, scrambled eggs, stuffed peppers, chocolate brownies, falafel, beef stew, spring
  rolls, oatmeal, paella
"""),
}

_NUM = re.compile(r"^([a-z]+):(\d+)-(\d+)(?:\*(\d+))?$")
_AN = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])(?!uni|one|use|Euro|eu|Uru|Ukr|uku)")


def _sum_of_products(expr: str, mem: dict[str, str]) -> str:
    """Evaluate an expression such as ``a*b+c`` over remembered numbers."""
    total = 0
    for term in expr.split("+"):
        product = 1
        for factor in term.split("*"):
            product *= int(mem.get(factor, factor))
        total += product
    return str(total)


def fill(template: str, rng: random.Random) -> str:
    """Fill one template."""
    mem: dict[str, str] = {}
    text = re.sub(r"\[([^\[\]]*\|[^\[\]]*)\]", lambda m: rng.choice(m[1].split("|")), template)

    def draw(match: re.Match[str]) -> str:
        key = match[1]
        if key.startswith("="):
            return _sum_of_products(key[1:], mem)
        number = _NUM.match(key)
        if number:
            step = int(number[4] or 1)
            value = str(rng.randrange(int(number[2]), int(number[3]) + 1, step))
            mem[number[1]] = value
            return value
        low = key[0].lower() + key[1:]
        if low not in mem:
            pool = [w for w in SLOTS[low.rstrip("0123456789")] if w not in mem.values()]
            mem[low] = rng.choice(pool)
        value = mem[low]
        if low == low.rstrip("0123456789") and low in SLOTS:
            mem[f"{low}_{len(mem)}"] = mem.pop(low)
        return value if low == key else value[0].upper() + value[1:]

    text = re.sub(r"\{([^{}]+)\}", draw, text)
    text = _AN.sub(lambda m: m[1] + "n ", text)
    return text.replace(" <nl> ", "\n").replace("<nl>", "\n")


MATH = block("""
{name1} [buys|picks up|orders] {n:2-9} packs of {things1} with {m:3-12} in each pack. After giving
  {k:2-5} {things1} to a friend, how many {things1} does {name1} have left?
{name1} has {n:12-90} {things1}. {name2} has {m:2-5} times as many. How many {things1} do
  [they|the two of them] have altogether?
A {job1} earns ${r:12-45} per hour and works {h:4-9} hours a day, {d:3-6} days a week. How much
  does the {job1} earn in {w:2-6} weeks?
{name1} saves ${s:5-40*5} every week. A new {thing} costs ${c:120-480*20}. How many full weeks
  must {name1} save, if {name1} already has ${k:10-60*10}?
{name1} is {a:6-20} years old. {name2} is {k:2-9} years older than {name1}, and {name3} is twice
  as old as {name2}. What is the sum of their ages?
In {y:3-12} years {name1} will be three times as old as {name2} is now. {name2} is {a:8-15}. How
  old is {name1} today?
A [train|bus|ferry] travels {v:30-90*5} miles per hour for {h:2-6} hours, then {u:20-60*5} miles
  per hour for {g:2-4} hours. How far does it travel [in total|altogether]?
{name1} reads {p:10-45*5} pages each weekday and {q:30-80*10} pages on each weekend day. How many
  pages does {name1} read in {w:2-6} weeks?
A bakery in {town} makes {n:10-40*2} trays of {m:6-24*2} rolls every morning. [Half|A quarter] of
  the rolls are sold before nine o'clock and {k:20-50} more are sold by noon. How many rolls are
  left?
A {thing} [normally|usually] costs ${p:40-200*20}. It is on sale for {d:10-50*10}% off, and
  {name1} also has a coupon for ${c:2-10} off the sale price. How much does {name1} pay?
{name1} bakes {n:24-96*12} cookies and gives [one third|one quarter|one half|one sixth] of them to
  the neighbours. Of the rest, {k:3-7} are eaten by the family. How many cookies remain?
A rectangular garden is {l:8-30} metres long and {w:4-7} metres wide. Fencing costs ${c:3-12} per
  metre. How much does it cost to fence the whole garden?
The floor of a room is {l:10-24*2} feet by {w:8-14*2} feet. Each tile covers 4 square feet and
  costs ${c:2-9}. What is the total cost of tiling the floor?
A school in {town} has {c:8-24} classes with {s:20-32} pupils each. On {day}, {a:5-40} pupils are
  absent. How many pupils are present?
{name1} runs {a:2-8} kilometres on Monday and increases the distance by {k:1-3} kilometres each
  day. How many kilometres has {name1} run by the end of Friday?
{name1} has ${n:50-120*5} and buys {a:2-4} {things} at ${p:3-9} each and a {thing} for ${q:10-20}.
  How much money is left?
A tank holds {c:200-900*100} litres of water. It is filled at {f:10-30*5} litres per minute but
  leaks {l:2-6} litres per minute. How much water is in the tank after {t:5-9} minutes?
Tickets to the {town} fair cost ${a:8-16*2} for adults and half of that for children. A group of
  {n:2-6} adults and {m:3-9} children buys tickets. [What is the total price?|How much do they pay
  altogether?]
{name1}, {name2} and {name3} share the cost of a ${n:60-480*30} [trip|party] equally. {name1} then
  pays ${k:20-60*10} more for snacks. What did {name1} spend in total?
A recipe for {dish} serves {s:2-6*2} people and needs {g:100-400*50} grams of the main ingredient.
  How many grams are needed for {p:8-24*4} people?
A farmer in {town} collects {e:60-180*12} eggs a day, keeps {k:6-18*6} for the family and sells
  the rest by the dozen at ${p:2-6} a dozen. How much does the farmer make in {d:3-7} days?
There are {n:30-80*2} [birds|children|players] in a park. Half of them leave, and then {m:4-15}
  more arrive. Later a further {k:3-9} go home. How many are there now?
{name1} takes {a:20-50*5} minutes to walk to work and {b:10-18} minutes to come home by bus. How
  many hours does {name1} spend travelling in {d:5-20*5} working days?
A box contains red, blue and green {things1}. There are {r:6-30} red ones, twice as many blue ones
  as red ones, and {k:2-5} fewer green ones than red ones. How many {things1} are in the box?
{name1} sells {n:10-60} cups of lemonade at ${p:1-4} each. The lemons cost ${c:3-9} and the cups
  cost ${d:2-6}. What is the profit?
A {job} drives {m:12-48*2} miles each way to work, {d:3-6} days a week. The car uses one gallon
  for every {g:20-30*5} miles and petrol costs ${p:3-5} a gallon. What is the weekly cost of
  petrol?
Of the {n:40-400*40} people at a concert in {town}, {p:10-60*10}% are under eighteen. [One
  half|One quarter] of the rest are over sixty. How many people are between eighteen and sixty?
{name1} and {name2} start with the same number of {things1}. After {name1} gives {k:3-12}
  {things1} to {name2}, {name2} has {m:30-60*2} {things1}. How many does {name1} have now?
A phone plan costs ${b:10-30*5} a month plus {c:5-20*5} cents for every message. {name1} sent
  {n:40-200*20} messages in {month}. What was the bill?
A library charges {c:10-50*5} cents a day for each late book. {name1} returned {n:2-6} books
  {d:3-14} days late. How much is the fine in dollars?
A rope of {n:60-240*12} centimetres is cut into two pieces so that one is three times as long as
  the other. How long is the shorter piece?
The ratio of cats to dogs at the {town} animal shelter is {a:2-5} to {b:6-9}. There are {=a*8}
  cats. How many animals are there altogether?
{name1} scored {a:60-95}, {b:60-95} and {c:60-95} on three tests. What score is needed on the
  fourth test for an average of {t:80-85}?
A worker can paint {n:2-5} fences in {h:4-8} hours. How many fences can {w:3-8} workers paint in
  {d:2-4} days if each works 8 hours a day?
{name1} planted {r:4-12} rows of {c:5-15} carrots. Rabbits ate [a tenth|a fifth|a half] of them.
  {name1} sold the others for {p:10-50*10} cents each. How much money did {name1} get?
A machine makes {n:15-60*5} {things1} per minute. It runs for {h:2-8} hours but stops for
  {s:10-50*10} minutes for repairs. How many {things1} does it make?
[Think step by step.|Solve this step by step.|Show your work.] {name1} has {n:3-9} ten-dollar
  notes, {m:2-8} five-dollar notes and {k:4-20} one-dollar coins. A {thing} costs ${p:20-60}. How
  much will {name1} have after buying it?
[Think step by step|Reason carefully|Explain each step]: a shop sells {things1} in boxes of
  {n:6-12}. {name1} needs {m:50-140} {things1}. How many boxes must {name1} buy and how many
  {things1} will be spare?
A movie starts at {h:1-7}:{m:10-50*5} p.m. and lasts {n:85-150*5} minutes, after {k:10-20*5}
  minutes of advertisements. At what time does it end?
{name1} is reading a book of {n:240-600*60} pages. On {day} {name1} read one sixth of it and the
  next day one half of what was left. How many pages are still unread?
What is {p:5-95*5}% of {n:40-800*20}, and how much more is it than {k:5-20}?
The sum of three consecutive [whole|even|odd] numbers is {n:21-190}. [Is this possible? If so,
  find them.|Find the numbers or show that there are none.]
A water bill is ${a:8-20} for the first {b:10-20*5} cubic metres and ${c:2-4} for each further
  cubic metre. The {surname} family used {d:25-60*5} cubic metres. What did they pay?
{name1} invests ${n:200-2000*200} at {r:2-8}% simple interest per year. How much money is there
  after {t:2-6} years?
A bag of rice weighs {n:5-25*5} kilograms. A restaurant uses {m:2-4} kilograms each day. How many
  bags must it order for the {d:28-31} days of {month}?
{name1} and {name2} run a small business that makes {things1}. On {day1} they made {a:20-60}
  {things1}, and on {day2} they made {k:2-4} times as many. They sold all of them at ${p:2-9} each
  and paid ${c:30-90*10} for material. If they share the profit equally, how much does each of
  them get?
{name1} wants to buy a {thing1} for ${p:150-400*10} and a {thing2} for ${q:20-90*5}. {name1} earns
  ${r:10-18*2} an hour as a {job1} and works {h:3-6} hours on each of {d:3-5} days a week. After
  spending half of the pay on rent and food, how many weeks will it take to save enough?
At the {town1} market, {things1} cost ${a:2-6} each and {things2} cost ${b:3-9} each. {name1}
  bought {n:3-9} of the former and {m:2-8} of the latter and paid with two $100 notes. The seller
  gave a discount of ${c:2-5} on the whole. How much change did {name1} get?
There are {n:3-6} floors in a library in {town1}. Each floor has {s:12-30} shelves, and each shelf
  holds {b:40-90*5} books. If {p:10-30*10}% of the books are on loan and another {k:30-150*10} are
  being repaired, how many books are standing on the shelves?
On {day1} {name1} drove from {town1} to {town2} at {v:40-70*10} miles per hour, which took {h:2-5}
  hours. On the way back there was heavy traffic, and the average speed was only half of that. How
  many hours did {name1} spend driving in total, and how many miles were driven?
{name1} grows {a:20-80*4} pumpkins. A quarter of them are too small to be sold. Of the others,
  {name1} gives {k:3-9} to {name2} and sells the rest at ${p:3-8} each. {name1} then uses
  ${c:20-50*10} of the money to buy seeds. How much money remains?
{name1}'s class of {n:20-32*2} pupils goes on a trip to {town1}. The bus costs ${b:120-360*20},
  and a ticket for the museum is ${t:4-9} for each pupil. The school pays half of the bus, and a
  bake sale has brought in ${s:40-100*10}. How much does each pupil have to pay if the rest is
  shared equally?
{name1}, {name2} and {name3} collect {things1}. {name1} has {a:12-40} of them. {name2} has {k:3-9}
  more than {name1}, and {name3} has as many as {name1} and {name2} together. {name3} then sells a
  third of the collection, rounded down. How many do the three have altogether at the end? Think
  step by step.
A {job1} in {town1} starts work at {h:6-9} a.m. and finishes at {g:3-6} p.m. with a lunch break of
  {b:30-60*15} minutes. The pay is ${r:14-32*2} an hour, and the break is not paid. How much does
  the {job1} earn in a week of five days?
{name1} fills {n:4-12} jars with jam. Each jar takes {g:250-500*50} grams of fruit and
  {s:100-250*50} grams of sugar. Fruit costs ${p:3-6} a kilogram and sugar costs ${q:1-2} a
  kilogram. If a jar is sold for ${v:5-8}, what is the total profit?
""")

HAND_MATH = block("""
Lucia makes 3 quilts. Each quilt needs 24 squares, and she can cut 8 squares from one sheet of
  cloth. Sheets cost $4 each. What does the cloth cost?
A snail climbs 5 feet up a wall each day and slides back 2 feet each night. The wall is 20 feet
  high. On which day does it reach the top?
Mr. Dunn's class of 28 pupils goes canoeing. Each canoe holds 3 people, and Mr. Dunn goes too. How
  many canoes are needed?
Half of a number plus 14 is the same as the number minus 3. What is the number?
The big hand of a clock passes the 12 once every hour. How many times does it pass the 12 between
  7:30 in the morning and 9:15 at night?
Two candles are each 30 cm tall. One burns 2 cm an hour and the other 3 cm an hour. After how many
  hours is one twice as tall as the other?
Pearl has 40 coins made up of nickels and dimes. They are worth $2.75. How many dimes does she
  have?
A pizza is cut into 12 slices. Ed eats a third, Flo eats a quarter of what is left, and the dog
  steals 2 slices. How many slices remain?
On a farm there are chickens and sheep. Altogether there are 30 heads and 84 legs. How many sheep
  are there?
A parking garage charges $5 for the first hour and $3 for each further hour or part of an hour.
  How much does it cost to park for 4 hours and 20 minutes?
Nina's phone battery loses 12% every hour when she plays games and 3% every hour when it is idle.
  It starts at 100%. She plays for 4 hours and leaves it idle for 9. What is left?
Six friends each shake hands once with every other friend. How many handshakes take place?
A jacket is marked up by 25% and then marked down by 20%. If it started at $80, what is the final
  price?
The perimeter of a square field is 240 metres. A path straight across the middle, parallel to a
  side, divides it in two. What is the area of each half?
A father is 36 and his daughter is 8. In how many years will he be exactly three times as old as
  she is?
A cyclist rides uphill at 6 mph for 2 hours and comes back down the same road at 12 mph. What is
  the average speed for the whole ride?
It takes 5 machines 5 minutes to make 5 bolts. How long do 100 machines need to make 100 bolts?
Olga pours 750 ml of juice equally into 6 glasses and then drinks 40 ml from her own glass. How
  much is left in it?
A choir has 48 singers. There are twice as many altos as basses and as many sopranos as altos and
  basses together. How many sopranos are there?
There are 365 days in a year. If January 1 falls on a Tuesday, on which day does December 31 fall?
Carl's garden hose fills a pool in 6 hours. His neighbour's hose fills it in 3 hours. How long do
  they take together?
A stack of 500 sheets of paper is 5 cm high. How thick is one sheet in millimetres?
Sana has three times as many stamps as Theo. If she gives him 20, they will have the same number.
  How many does each have?
Each side of a cube is 3 cm. The cube is painted and then cut into 1 cm cubes. How many small
  cubes have no paint on them?
A bus leaves the depot with 14 people. At the first stop 6 get on and 3 get off. At the second
  stop half of the riders get off. How many are left?
A cafe sold 45 coffees and 30 teas for a total of $210. A tea costs $2. What does a coffee cost?
The temperature was -4 degrees at dawn, rose 11 degrees by noon and fell 9 degrees by midnight.
  What was it at midnight?
Greg types 45 words a minute. His essay has 1,260 words and he pauses for 6 minutes in the middle.
  How long does he need?
A fruit seller mixes 4 kg of raisins at $6 per kg with 2 kg of nuts at $9 per kg. What should 1 kg
  of the mixture cost?
A ladder has 15 rungs that are 30 cm apart. How far is it from the first rung to the last?
Ada's dog eats 350 grams of food a day. A 14 kg bag costs $42. What does it cost to feed the dog
  each day?
Three numbers have an average of 18. Two of them are 12 and 25. What is the third?
If 3 pens and 2 pads cost $13 and 1 pen and 2 pads cost $7, what does one pad cost?
A theatre has 20 rows. The first row has 12 seats, and each row has 2 more than the row in front.
  How many seats are in the last row?
At a sale every third customer gets a free mug and every fifth a free pen. How many of the first
  60 customers get both?
Maya spent two fifths of her money on a coat and half of the rest on shoes. She has $27 left. How
  much did she have at first?
A taxi charges $3.50 plus $1.75 per mile. Leo has $21. How many whole miles can he travel?
A printer prints 18 pages a minute. How long does it take to print 12 copies of a 45-page report?
Jill's alarm clock loses 4 minutes every day. She sets it correctly at noon on Monday. What does
  it show at noon on the following Sunday?
A gardener plants a tree every 6 metres along both sides of a 120-metre avenue, including at both
  ends. How many trees are planted?
One third of the pupils in a school walk, one half take the bus, and the other 70 cycle. How many
  pupils are there?
Ken drank 1.5 litres of water on each of four days and 2.25 litres on each of the next three. What
  was his daily average, rounded to one decimal?
A book and a pen cost $11 together. The book costs $10 more than the pen. How much is the pen?
A hotel has 5 floors with 18 rooms each. On Friday 70% of the rooms are full. How many rooms are
  empty?
A recipe needs two thirds of a cup of sugar. How many cups are needed for four and a half batches?
The population of a village fell from 800 to 680. By what percentage did it fall?
Toni earns $14 an hour, and one and a half times that after 40 hours a week. What does she earn in
  a week of 46 hours?
The angles of a triangle are in the ratio 2 to 3 to 5. What is the largest angle?
Four painters finish a house in 6 days. How many days would three painters need at the same speed?
Sam flips a fair coin three times. What is the chance of getting exactly two heads? Think step by
  step.
A lorry weighs 3.2 tonnes when empty and carries 85 crates of 24 kg each. What does it weigh when
  loaded, in kilograms?
A string quartet rehearses 2 hours on weekdays and 3.5 hours on Saturday, and rests on Sunday. How
  many hours is that in 8 weeks?
The digits of a two-digit number add up to 11. Swapping them makes the number 27 larger. What is
  the number?
A video has 1,200 views on day one, and the views double each day. On which day does it first pass
  50,000 views that day?
Wendy knits one row in 4 minutes. A scarf has 180 rows. If she knits 45 minutes every evening, how
  many evenings does she need?
A circle has a radius of 7 cm. Using 22/7 for pi, what is its area?
In a race Ann finishes 12 seconds before Bob, and Bob finishes 9 seconds after Cy, who takes 65
  seconds. What is Ann's time?
A tin of 20 biscuits is shared so that each adult gets 2 and each child gets 3. There are 4
  adults, and nothing is left over. How many children are there?
Light travels about 300,000 km in a second. How far does it travel in a minute and a half?
Rob has 5 shirts, 3 pairs of trousers and 2 hats. How many outfits of one shirt, one pair of
  trousers and one hat can he wear?
Ian fills a 12-litre bucket that has a hole losing half a litre a minute, using a tap that gives 2
  litres a minute. How long until the bucket is full?
""")


INSTRUCTION = block("""
[Explain|Describe] {topic} to {audience}.
Explain {topic} in [one paragraph|two sentences|three sentences|simple words|about 100 words].
[List|Name|Give me] {n:3-8} [interesting|surprising|important|basic] facts about {topic}.
List {n:3-7} [advantages|disadvantages|benefits|drawbacks] of {hobby} as a hobby.
What are the pros and cons of {topic}?
Write a [short|four-line|funny|rhyming|free-verse] poem about [a|an old|a lost] {thing}.
Write a [haiku|limerick|short poem|couplet] about {feeling} in {month}.
Write a short story about a {job} who finds a {thing} in a {place}.
Write the [first|opening|last] paragraph of a [mystery|fantasy|romance|science
  fiction|horror|children's] story set in a {place}.
Write a fable about a {animal1} and a {animal2}, with a moral at the end.
Write a [short|{tone}] email to a {job} asking [for a meeting on {day}|for advice|about
  prices|about opening hours|to change an appointment].
Write a {tone} email to {name}, who [missed a deadline|is leaving the company|forgot your
  birthday|sent you a gift|asked for a refund|has just moved to {town}].
Write a {tone} message inviting {name} to [a dinner|a birthday party|a picnic|a game night|a
  concert|a workshop] on {day}.
Write a {tone} [product description|advertisement|slogan|review] for a {thing}.
Rewrite this sentence in a {tone} tone: "[The meeting on {day} has been cancelled|Your order of
  {things} is late|We can not give you a refund|Please stop leaving dishes in the sink|I did not
  like the {dish}|The report needs more work]."
Rewrite the sentence in the [passive voice|past tense|future tense|form of a question|negative]:
  "{name} [repairs the {thing}|takes the {animal} to the park|cooks {dish} for the guests|writes a
  letter to the {job}|paints a picture of the {place}]."
Classify these [words|items] as [animals or things|living or not living|heavy or light|indoor or
  outdoor]: {animal1}, {thing1}, {animal2}, {thing2}, {thing3}.
Is the sentiment of this review positive, negative or neutral? "[The {thing} broke after {n:2-9}
  days and nobody answered my emails.|I use the {thing} every day and could not be happier.|The
  {dish} was fine, but nothing special.|Lovely place, friendly staff, and the best {dish} in
  {town}.|It took {n:2-9} weeks to arrive, yet it works well.]"
Give {n:3-6} tips for [someone who wants to start|getting better at|saving money on|staying
  motivated while|teaching a child] {hobby}.
Compare {hobby1} and {hobby2} as [hobbies|ways to relax|things to do with friends].
Compare [being|working as|the daily life of] a {job1} and a {job2}.
Describe [the daily routine|the main duties|the typical tools|the most useful skills] of a {job}.
Describe a {place} [at dawn|at night|during a storm|in winter|through the eyes of a child|using
  all five senses].
Write a [recipe|shopping list|step-by-step guide] for {dish} for {n:2-6} people.
Suggest {n:3-6} [names|slogans|gift ideas|special offers] for a shop that sells {things1} and
  {things2}.
Brainstorm {n:4-8} ideas for [a school project|a blog post|a podcast episode|a short talk] about
  {topic}.
Create a {n:3-7}-day [plan|schedule|travel itinerary] for a trip to {country}[ with children| on a
  small budget||].
Make a [weekly|daily|weekend] schedule for a {job} who also enjoys {hobby}.
Generate {n:3-6} [quiz|discussion|interview|multiple-choice] questions about {topic}.
Write {n:4-8} interview questions for a {job}.
Write a dialogue between a {job} and a {animal} about {topic}.
Write a conversation in a {place} between {name1} and {name2}, who [are lost|have not met for
  years|disagree about {topic}|both want the last {thing}].
Give me [a metaphor|a simile|an analogy] for {topic} and explain it.
Write a [thank-you note|letter of complaint|letter of recommendation|cover letter] [to|for] a
  {job}.
Write a [tweet|headline|caption|short announcement] about [a new {place}|a festival in
  {town}|{topic}|a lost {animal}].
What should I do if [my {thing} is broken|I am nervous about {topic}|my neighbour keeps me awake
  by {hobby}|I find a hurt {animal}|a {job} sends me the wrong bill]?
Write an argument [for|against] [banning {thing}s in schools|teaching {topic} to all pupils|making
  {hobby} an Olympic event|moving school to {day}s only].
Define [the term|the following idea] and give an example: {topic}.
Put these words in alphabetical order: {animal1}, {job1}, {animal2}, {animal3}, {job2}.
Write a sentence that contains the words "{animal}", "{thing}" and "{feeling}".
Find the odd one out and say why: {animal1}, {animal2}, {thing}, {animal3}.
Give {n:3-5} synonyms and {m:2-3} antonyms for the word
  "[brave|quick|happy|angry|calm|bright|difficult|honest|strange|tiny|huge|lazy|rich|polite|quiet|ancient|careful|fresh|rough|simple]".
Correct the [grammar|mistakes|spelling and grammar] in this sentence: "[{name} dont like {dish}
  since {month}|Me and {name} was going to the {place} yesterday|Their is to many {things} on the
  table|He have buyed a {thing} last {day}|The {animal}s is sleeping in it's box|She didnt knew
  the {job} were here]."
Turn these notes into a [short paragraph|friendly email|press release]: {day}, {town}, {n:20-90}
  visitors, free {dish}, talk by {name} {surname} ({job}), rain.
Imagine that {animal}s could talk. [What would they complain about?|Write a diary entry by one of
  them.|How would the world change?]
Write a motivational [speech|message|quote] for [a {job} on a hard day|a team that lost a
  game|someone learning {topic}|people who find {hobby} difficult].
Outline [an essay|a presentation|a short lecture] on {topic} with {n:3-5} main points.
Translate into [French|Spanish|German|Italian]: "[Where is the {place}|I would like some {dish},
  please|My {thing} is very old|The {animal} is sleeping|See you on {day}]."
""")

HAND_INSTRUCTION = block("""
Explain why the sky looks blue, as if you were talking to a child.
List five things to check before buying a used car.
Write a polite note asking the people upstairs to play music more quietly after ten.
Suggest a healthy breakfast that takes less than ten minutes.
Write a birthday wish for a colleague whom you hardly know.
Turn this into a list of steps: To plant a bulb, dig a hole, drop it in with the tip up, cover it
  with soil and water it.
Name three ways to remember people's names at a party.
Sort these numbers from largest to smallest: 14, 3, 99, 27, 58, 8.
Which of these is not a fruit: plum, carrot, cherry, mango? Explain your choice.
Write a two-sentence horror story.
Describe the taste of chocolate to someone who has never eaten it.
Write an out-of-office reply for a week of holiday in August.
Shorten this sentence without losing its meaning: Due to the fact that it was raining very
  heavily, we took the decision not to go outside.
Give advice to a student who always starts homework at the last minute.
Make up a new holiday and explain how people celebrate it.
Write a riddle whose answer is "shadow".
Explain the difference between weather and climate.
Rewrite as reported speech: "I will call you tomorrow," said Peter.
Come up with a name and a short description for a robot that waters plants.
Write three questions I could ask my grandparents about their childhood.
How can a small restaurant get more guests on weekdays? Give four ideas.
Change the point of view to the third person: I missed my train, so I walked home along the river.
Summarize the story of Little Red Riding Hood in three sentences.
Write a packing list for a weekend of camping in cold weather.
Explain how to tie a shoelace in numbered steps.
Identify the nouns, verbs and adjectives: The tired runner slowly climbed the steep hill.
Write a letter to your future self, ten years from now.
Give an example of a sentence that uses irony.
What are good topics for small talk with strangers?
Write a review of an imaginary film called The Last Elevator.
Fill in the blank with a good word and explain why: The old man was so ___ that he never left a
  tip.
Convert 5 kilometres to miles and explain how you did it.
Describe your ideal city in one paragraph.
Write a short apology from an airline for losing a passenger's suitcase.
Write a lullaby of eight lines about the moon.
Which would be more useful on a desert island, a rope or a pot? Justify your answer.
Explain the saying "Don't count your chickens before they hatch".
Think of a science experiment that children can do in the kitchen.
Write instructions for using a public washing machine.
Make this sentence more vivid: The dog ran across the field.
Create a table with three planets, their colour and their number of moons.
Write a text message to cancel a dentist appointment.
List the ingredients of a simple salad dressing and how to mix them.
Invent a superhero whose power seems useless at first.
Give three reasons why people keep diaries.
Write a brief speech for a retiring teacher.
What questions should I ask before I rent a flat?
Extract all names and dates from this text: Maria Lopez joined on 4 May 2012, and Tom Reed left on
  1 June 2015.
Write a dialogue in which a customer returns a talking toaster.
Explain to a new cook how to know whether pasta is done.
Combine these sentences into one: The shop was small. The shop sold maps. The maps were very old.
Describe how a bicycle stays upright, without using technical words.
Write a weather forecast for a planet where it rains lemonade.
Suggest five polite ways to say no.
Pick the best title for a talk on bees: "Buzz", "Small Wings, Big Work" or "Insects". Say why.
Write an acrostic poem for the word OCEAN.
Explain what a budget is and how to begin one.
Reply with exactly three words that describe winter.
Write a job advertisement for a dragon keeper at a zoo.
Give a counter-argument to this claim: Homework should be banned because children need more free
  time.
How should I prepare the night before an important exam?
""")


Spec = tuple[str, str, str, str, Callable[..., Any]]

# names | parameter kinds | return type | descriptions | reference (used for the examples)
# kinds: I ints, L words, s word, S sentence, n small int, k tiny int, D str-to-int dict, M rows
SPECS: list[Spec] = [
    (
        "sum_even|add_even_values",
        "I",
        "int",
        "Return the sum of the even numbers in {0}.|Add up all even elements of {0}.",
        lambda x: sum(v for v in x if v % 2 == 0),
    ),
    (
        "count_odd|number_of_odds",
        "I",
        "int",
        "Count how many odd numbers there are in {0}.",
        lambda x: sum(v % 2 for v in x),
    ),
    (
        "second_largest|runner_up",
        "I",
        "int",
        "Return the second largest distinct value in {0}.|Find the runner-up: the second "
        "biggest different number in {0}.",
        lambda x: sorted(set(x))[-2],
    ),
    (
        "running_total|cumulative_sum",
        "I",
        "list[int]",
        "Return a list whose i-th element is the sum of the first i + 1 elements of {0}.",
        lambda x: [sum(x[: i + 1]) for i in range(len(x))],
    ),
    (
        "max_gap|largest_step",
        "I",
        "int",
        "Return the largest absolute difference between neighbouring elements of {0}.",
        lambda x: max(abs(a - b) for a, b in itertools.pairwise(x)),
    ),
    (
        "remove_duplicates|unique_in_order",
        "I",
        "list[int]",
        "Remove repeated values from {0}, keeping the first occurrence of each.|Return the "
        "distinct elements of {0} in their original order.",
        lambda x: list(dict.fromkeys(x)),
    ),
    (
        "rotate_left|shift_left",
        "Ik",
        "list[int]",
        "Rotate {0} to the left by {1} positions.|Move the first {1} elements of {0} to its end.",
        lambda x, k: x[k:] + x[:k],
    ),
    (
        "every_nth|take_every",
        "Ik",
        "list[int]",
        "Return every {1}-th element of {0}, starting with the first one.",
        lambda x, k: x[::k],
    ),
    (
        "chunk_list|split_into_groups",
        "Ik",
        "list[list[int]]",
        "Split {0} into consecutive groups of size {1}. The last group may be shorter.",
        lambda x, k: [x[i : i + k] for i in range(0, len(x), k)],
    ),
    (
        "is_increasing|strictly_rising",
        "I",
        "bool",
        "Return True if each element of {0} is larger than the one before it, and False otherwise.",
        lambda x: all(a < b for a, b in itertools.pairwise(x)),
    ),
    (
        "above_average|values_over_mean",
        "I",
        "list[int]",
        "Return the elements of {0} that are greater than the average of {0}.",
        lambda x: [v for v in x if v > sum(x) / len(x)],
    ),
    (
        "product_of_list|multiply_all",
        "I",
        "int",
        "Multiply all numbers in {0} together. The product of an empty list is 1.",
        lambda x: __import__("math").prod(x),
    ),
    (
        "pair_sums|neighbour_sums",
        "I",
        "list[int]",
        "Return the sums of all neighbouring pairs in {0}.",
        lambda x: [a + b for a, b in itertools.pairwise(x)],
    ),
    (
        "has_pair_with_sum|two_add_up_to",
        "In",
        "bool",
        "Check whether two different positions of {0} hold numbers that add up to {1}.",
        lambda x, n: any(x[i] + x[j] == n for i in range(len(x)) for j in range(i)),
    ),
    (
        "index_of_max|where_is_the_peak",
        "I",
        "int",
        "Return the index of the largest element of {0}. If it occurs more than once, return "
        "the first index.",
        lambda x: x.index(max(x)),
    ),
    (
        "clip_values|limit_to",
        "In",
        "list[int]",
        "Replace every element of {0} that is larger than {1} by {1}.",
        lambda x, n: [min(v, n) for v in x],
    ),
    (
        "count_greater|how_many_above",
        "In",
        "int",
        "Count the elements of {0} that are greater than {1}.",
        lambda x, n: sum(v > n for v in x),
    ),
    (
        "reverse_pairs|swap_neighbours",
        "I",
        "list[int]",
        "Swap the elements at positions 0 and 1, 2 and 3, and so on. A last element without a"
        " partner stays where it is.",
        lambda x: [v for i in range(0, len(x), 2) for v in x[i : i + 2][::-1]],
    ),
    (
        "alternating_sum|plus_minus",
        "I",
        "int",
        "Add the elements of {0} at even positions and subtract those at odd positions.",
        lambda x: sum(x[::2]) - sum(x[1::2]),
    ),
    (
        "sort_by_last_digit|order_by_ones",
        "I",
        "list[int]",
        "Sort {0} by the last digit of each number. Numbers with the same last digit keep "
        "their order.",
        lambda x: sorted(x, key=lambda v: v % 10),
    ),
    (
        "longest_run|longest_streak",
        "I",
        "int",
        "Return the length of the longest run of strictly increasing neighbouring values in {0}.",
        lambda x: max(
            j - i
            for i in range(len(x))
            for j in range(i + 1, len(x) + 1)
            if all(x[t] < x[t + 1] for t in range(i, j - 1))
        ),
    ),
    (
        "best_profit|max_profit",
        "I",
        "int",
        "Each element of {0} is the price on one day. Return the best profit from buying on "
        "one day and selling on a later day, or 0.",
        lambda x: max([0] + [x[j] - x[i] for i in range(len(x)) for j in range(i + 1, len(x))]),
    ),
    (
        "median_value|middle_of",
        "I",
        "float",
        "Return the median of {0} as a float.",
        lambda x: float(statistics.median(x)),
    ),
    (
        "value_range|spread",
        "I",
        "int",
        "Return the difference between the largest and the smallest element of {0}.",
        lambda x: max(x) - min(x),
    ),
    (
        "prefix_maxima|records_so_far",
        "I",
        "list[int]",
        "Return a list of the largest value seen so far at each position of {0}.",
        lambda x: [max(x[: i + 1]) for i in range(len(x))],
    ),
    (
        "partition_parity|evens_before_odds",
        "I",
        "list[int]",
        "Reorder {0} so that all even numbers come before all odd numbers, keeping the order "
        "inside both groups.",
        lambda x: [v for v in x if v % 2 == 0] + [v for v in x if v % 2],
    ),
    (
        "squares_of_odds|square_odd_numbers",
        "I",
        "list[int]",
        "Return the squares of the odd numbers in {0}.",
        lambda x: [v * v for v in x if v % 2],
    ),
    (
        "local_peaks|find_peaks",
        "I",
        "list[int]",
        "Return the elements of {0} that are larger than both neighbours. The first and last "
        "element are never peaks.",
        lambda x: [b for a, b, c in zip(x, x[1:], x[2:], strict=False) if a < b > c],
    ),
    (
        "interleave|merge_alternately",
        "II",
        "list[int]",
        "Interleave {0} and {1}, starting with {0}. Stop when the shorter list is used up.",
        lambda a, b: [v for p in zip(a, b, strict=False) for v in p],
    ),
    (
        "common_elements|shared_values",
        "II",
        "list[int]",
        "Return the sorted list of the distinct values found both in {0} and in {1}.",
        lambda a, b: sorted(set(a) & set(b)),
    ),
    (
        "dot_product|weighted_sum",
        "II",
        "int",
        "Return the sum of the products of the matching elements of {0} and {1}. Ignore "
        "elements without a partner.",
        lambda a, b: sum(p * q for p, q in zip(a, b, strict=False)),
    ),
    (
        "only_in_first|list_difference",
        "II",
        "list[int]",
        "Return the elements of {0} that do not appear in {1}.",
        lambda a, b: [v for v in a if v not in b],
    ),
    (
        "merge_sorted|combine_sorted",
        "II",
        "list[int]",
        "Return one sorted list that holds all elements of {0} and {1}.",
        lambda a, b: sorted(a + b),
    ),
    (
        "count_vowels|vowel_count",
        "S",
        "int",
        "Count the vowels (a, e, i, o, u) in {0}, ignoring case.",
        lambda s: sum(c in "aeiou" for c in s.lower()),
    ),
    (
        "reverse_words|words_backwards",
        "S",
        "str",
        "Reverse the order of the words in {0}.",
        lambda s: " ".join(s.split()[::-1]),
    ),
    (
        "flip_each_word|mirror_words",
        "S",
        "str",
        "Reverse the letters of each word in {0} but keep the order of the words.",
        lambda s: " ".join(w[::-1] for w in s.split()),
    ),
    (
        "longest_word|find_longest",
        "S",
        "str",
        "Return the longest word in {0}. If there is a tie, return the first of them.",
        lambda s: max(s.split(), key=len),
    ),
    (
        "title_case|capitalize_words",
        "S",
        "str",
        "Capitalize the first letter of every word in {0}.",
        lambda s: s.title(),
    ),
    (
        "make_acronym|initials",
        "S",
        "str",
        "Return the upper-case initials of the words in {0}, joined together.",
        lambda s: "".join(w[0] for w in s.split()).upper(),
    ),
    (
        "word_lengths|measure_words",
        "S",
        "list[int]",
        "Return the lengths of the words in {0}, in order.",
        lambda s: [len(w) for w in s.split()],
    ),
    (
        "count_words_with|words_containing",
        "Sc",
        "int",
        "Count the words in {0} that contain the character {1}.",
        lambda s, c: sum(c in w for w in s.split()),
    ),
    (
        "remove_vowels|drop_vowels",
        "S",
        "str",
        "Return {0} without its vowels.",
        lambda s: "".join(c for c in s if c not in "aeiouAEIOU"),
    ),
    (
        "letter_counts|count_letters",
        "s",
        "dict[str, int]",
        "Return a dictionary that maps each letter of {0} to the number of times it occurs.",
        lambda s: dict(Counter(s)),
    ),
    (
        "is_palindrome|reads_the_same",
        "s",
        "bool",
        "Return True if {0} reads the same forwards and backwards.",
        lambda s: s == s[::-1],
    ),
    (
        "caesar_shift|shift_letters",
        "sk",
        "str",
        "Shift each lower-case letter of {0} forward by {1} places in the alphabet, going "
        "from z back to a.",
        lambda s, k: "".join(chr((ord(c) - 97 + k) % 26 + 97) for c in s),
    ),
    (
        "run_length_encode|compress",
        "s",
        "str",
        "Replace each run of equal characters in {0} by the character and the length of the run.",
        lambda s: re.sub(r"(.)\1*", lambda m: m[1] + str(len(m[0])), s),
    ),
    (
        "first_unique|first_single_letter",
        "s",
        "str",
        "Return the first character of {0} that occurs only once, or an empty string if there"
        " is none.",
        lambda s: next((c for c in s if s.count(c) == 1), ""),
    ),
    (
        "to_snake|spaces_to_underscores",
        "S",
        "str",
        "Turn {0} into lower case and replace the spaces by underscores.",
        lambda s: s.lower().replace(" ", "_"),
    ),
    (
        "to_camel|camel_case",
        "S",
        "str",
        "Turn the words of {0} into one camelCase identifier.",
        lambda s: s.split()[0].lower() + "".join(w.title() for w in s.split()[1:]),
    ),
    (
        "double_letters|repeat_chars",
        "sk",
        "str",
        "Repeat each character of {0} {1} times.",
        lambda s, k: "".join(c * k for c in s),
    ),
    (
        "sort_letters|alphabetize",
        "s",
        "str",
        "Return the letters of {0} in alphabetical order.",
        lambda s: "".join(sorted(s)),
    ),
    (
        "are_anagrams|same_letters",
        "ss",
        "bool",
        "Return True if {0} and {1} consist of the same letters in a possibly different order.",
        lambda a, b: sorted(a) == sorted(b),
    ),
    (
        "common_prefix|shared_start",
        "ss",
        "str",
        "Return the longest string with which both {0} and {1} start.",
        lambda a, b: __import__("os").path.commonprefix([a, b]),
    ),
    (
        "hamming|count_differences",
        "ss",
        "int",
        "Count the positions at which {0} and {1} differ, up to the length of the shorter string.",
        lambda a, b: sum(p != q for p, q in zip(a, b, strict=False)),
    ),
    (
        "mask_text|hide_all_but",
        "sk",
        "str",
        "Replace all characters of {0} except the last {1} by '*'.",
        lambda s, k: "*" * max(0, len(s) - k) + s[-k:],
    ),
    (
        "middle_char|centre_of_word",
        "s",
        "str",
        "Return the middle character of {0}, or the middle two if its length is even.",
        lambda s: s[(len(s) - 1) // 2 : len(s) // 2 + 1],
    ),
    (
        "swap_case_ends|capitalize_ends",
        "s",
        "str",
        "Return {0} with its first and last letter in upper case.",
        lambda s: s[0].upper() + s[1:-1] + s[-1].upper(),
    ),
    (
        "count_substring|occurrences",
        "ss",
        "int",
        "Count how often the first letter of {1} occurs in {0}.",
        lambda a, b: a.count(b[0]),
    ),
    (
        "longest_string|pick_longest",
        "L",
        "str",
        "Return the longest string in {0}. If several have the same length, return the first.",
        lambda x: max(x, key=len),
    ),
    (
        "filter_by_length|words_longer_than",
        "Lk",
        "list[str]",
        "Return the strings of {0} that are longer than {1} characters.",
        lambda x, k: [w for w in x if len(w) > k],
    ),
    (
        "group_by_first|index_by_initial",
        "L",
        "dict[str, list[str]]",
        "Group the strings in {0} by their first letter. Return a dictionary of lists.",
        lambda x: {c: [w for w in x if w[0] == c] for c in dict.fromkeys(w[0] for w in x)},
    ),
    (
        "join_with_and|readable_list",
        "L",
        "str",
        "Join the strings in {0} with commas, and with ' and ' before the last one.",
        lambda x: ", ".join(x[:-1]) + " and " + x[-1],
    ),
    (
        "sort_by_length|shortest_first",
        "L",
        "list[str]",
        "Sort {0} by length, and alphabetically among strings of equal length.",
        lambda x: sorted(x, key=lambda w: (len(w), w)),
    ),
    (
        "lengths_map|word_sizes",
        "L",
        "dict[str, int]",
        "Return a dictionary from each string in {0} to its length.",
        lambda x: {w: len(w) for w in x},
    ),
    (
        "total_letters|combined_length",
        "L",
        "int",
        "Return the total number of characters in all strings of {0}.",
        lambda x: sum(map(len, x)),
    ),
    (
        "ends_with_vowel|vowel_endings",
        "L",
        "list[str]",
        "Return the strings in {0} whose last letter is a vowel.",
        lambda x: [w for w in x if w[-1] in "aeiou"],
    ),
    (
        "concat_initials|first_letters",
        "L",
        "str",
        "Concatenate the first letters of the strings in {0}.",
        lambda x: "".join(w[0] for w in x),
    ),
    (
        "number_lines|enumerate_items",
        "L",
        "list[str]",
        "Return the strings of {0}, each with its number (from 1), a dot and a space in front.",
        lambda x: [f"{i}. {w}" for i, w in enumerate(x, 1)],
    ),
    (
        "pad_strings|make_equal_length",
        "L",
        "list[str]",
        "Pad all strings in {0} with dots on the right so that they are as long as the longest.",
        lambda x: [w.ljust(max(map(len, x)), ".") for w in x],
    ),
    (
        "is_prime|check_prime",
        "n",
        "bool",
        "Return True if {0} is a prime number.",
        lambda n: n > 1 and all(n % d for d in range(2, n)),
    ),
    (
        "primes_up_to|list_primes",
        "n",
        "list[int]",
        "Return all prime numbers that are not greater than {0}.",
        lambda n: [p for p in range(2, n + 1) if all(p % d for d in range(2, p))],
    ),
    (
        "digit_sum|add_digits",
        "N",
        "int",
        "Return the sum of the decimal digits of {0}.",
        lambda n: sum(map(int, str(n))),
    ),
    (
        "reverse_digits|backwards_number",
        "N",
        "int",
        "Return the number whose decimal digits are those of {0} in reverse order.",
        lambda n: int(str(n)[::-1]),
    ),
    (
        "digital_root|repeated_digit_sum",
        "N",
        "int",
        "Sum the digits of {0} again and again until a single digit is left, and return it.",
        lambda n: (n - 1) % 9 + 1,
    ),
    (
        "to_binary|binary_string",
        "n",
        "str",
        "Return the binary representation of {0} as a string without any prefix.",
        lambda n: f"{n:b}",
    ),
    (
        "count_ones|set_bits",
        "N",
        "int",
        "Count the ones in the binary representation of {0}.",
        lambda n: f"{n:b}".count("1"),
    ),
    (
        "divisors|list_factors",
        "n",
        "list[int]",
        "Return all positive divisors of {0} in increasing order.",
        lambda n: [d for d in range(1, n + 1) if n % d == 0],
    ),
    (
        "fibonacci_list|first_fibonacci",
        "k",
        "list[int]",
        "Return the first {0} Fibonacci numbers, starting with 0 and 1.",
        lambda k: [0, 1, 1, 2, 3, 5, 8, 13][:k],
    ),
    (
        "factorial|product_up_to",
        "k",
        "int",
        "Return the product of all whole numbers from 1 to {0}.",
        lambda k: __import__("math").factorial(k),
    ),
    (
        "collatz_steps|steps_to_one",
        "n",
        "int",
        "Halve {0} if it is even; otherwise triple it and add one. Return how many steps it "
        "takes to reach 1.",
        lambda n: _collatz(n),
    ),
    (
        "gcd|greatest_common_divisor",
        "nn",
        "int",
        "Return the greatest common divisor of {0} and {1}.",
        lambda a, b: __import__("math").gcd(a, b),
    ),
    (
        "lcm|least_common_multiple",
        "nn",
        "int",
        "Return the least common multiple of {0} and {1}.",
        lambda a, b: __import__("math").lcm(a, b),
    ),
    (
        "multiples_below|list_multiples",
        "kn",
        "list[int]",
        "Return all positive multiples of {0} that are smaller than {1}.",
        lambda k, n: list(range(k, n, k)),
    ),
    (
        "is_leap_year|has_leap_day",
        "y",
        "bool",
        "Return True if the year {0} is a leap year in the Gregorian calendar.",
        lambda y: y % 4 == 0 and (y % 100 != 0 or y % 400 == 0),
    ),
    (
        "century_of|year_to_century",
        "y",
        "int",
        "Return the century to which the year {0} belongs.",
        lambda y: (y + 99) // 100,
    ),
    (
        "format_minutes|as_clock",
        "N",
        "str",
        "Turn {0} minutes after midnight into a string 'HH:MM' on a 24-hour clock, starting "
        "again after a day.",
        lambda n: f"{n // 60 % 24:02d}:{n % 60:02d}",
    ),
    (
        "seconds_to_text|describe_seconds",
        "N",
        "str",
        "Write {0} seconds in the form '<minutes>m <seconds>s'.",
        lambda n: f"{n // 60}m {n % 60}s",
    ),
    (
        "celsius_to_fahrenheit|to_fahrenheit",
        "n",
        "float",
        "Convert {0} degrees Celsius to Fahrenheit, rounded to one decimal.",
        lambda n: round(n * 9 / 5 + 32, 1),
    ),
    (
        "fizz_list|fizz_buzz",
        "n",
        "list[str]",
        "List the numbers from 1 to {0} as strings, with 'Fizz' for multiples of 3, 'Buzz' "
        "for multiples of 5 and 'FizzBuzz' for both.",
        lambda n: [
            "Fizz" * (i % 3 == 0) + "Buzz" * (i % 5 == 0) or str(i) for i in range(1, n + 1)
        ],
    ),
    (
        "triangle_rows|stars",
        "k",
        "list[str]",
        "Return {0} strings that form a triangle of '*': the i-th string has i stars.",
        lambda k: ["*" * i for i in range(1, k + 1)],
    ),
    (
        "key_of_max|top_entry",
        "D",
        "str",
        "Return the key of {0} that has the largest value.|Return the name with the highest "
        "score in {0}.",
        lambda d: max(d, key=d.__getitem__),
    ),
    (
        "invert_dict|swap_keys_values",
        "D",
        "dict[int, str]",
        "Return a dictionary in which the keys and values of {0} have changed places.",
        lambda d: {v: k for k, v in d.items()},
    ),
    (
        "filter_dict|entries_at_least",
        "Dn",
        "dict[str, int]",
        "Keep only the entries of {0} whose value is at least {1}.",
        lambda d, n: {k: v for k, v in d.items() if v >= n},
    ),
    (
        "merge_counts|add_dicts",
        "DD",
        "dict[str, int]",
        "Merge {0} and {1}. For keys found in both, add the values.",
        lambda a, b: {k: a.get(k, 0) + b.get(k, 0) for k in {**a, **b}},
    ),
    (
        "sorted_by_value|ranking",
        "D",
        "list[str]",
        "Return the keys of {0}, sorted from the smallest value to the largest.",
        lambda d: sorted(d, key=d.__getitem__),
    ),
    (
        "average_value|mean_of_values",
        "D",
        "float",
        "Return the average of the values of {0}, rounded to two decimals.",
        lambda d: round(sum(d.values()) / len(d), 2),
    ),
    (
        "total_stock|sum_of_values",
        "D",
        "int",
        "Return the sum of all values in {0}.",
        lambda d: sum(d.values()),
    ),
    (
        "transpose|rows_to_columns",
        "M",
        "list[list[int]]",
        "Return the transpose of the matrix {0}.",
        lambda m: [list(r) for r in zip(*m, strict=False)],
    ),
    (
        "row_sums|sum_each_row",
        "M",
        "list[int]",
        "Return the sum of each row of {0}.",
        lambda m: [sum(r) for r in m],
    ),
    (
        "flatten|to_flat_list",
        "M",
        "list[int]",
        "Put all elements of the nested list {0} into one flat list.",
        lambda m: [v for r in m for v in r],
    ),
    (
        "diagonal_sum|trace",
        "M",
        "int",
        "Return the sum of the main diagonal of the matrix {0}.",
        lambda m: sum(r[i] for i, r in enumerate(m) if i < len(r)),
    ),
    (
        "matrix_max|largest_in_grid",
        "M",
        "int",
        "Return the largest number in the grid {0}.",
        lambda m: max(v for r in m for v in r),
    ),
    (
        "column|get_column",
        "M",
        "list[int]",
        "Return the first column of the matrix {0}.",
        lambda m: [r[0] for r in m],
    ),
    (
        "rotate_grid|turn_clockwise",
        "M",
        "list[list[int]]",
        "Return the grid {0} turned by 90 degrees clockwise.",
        lambda m: [list(r) for r in zip(*m[::-1], strict=False)],
    ),
]

CODE_WORDS = words("""
apple, banana, level, river, orange, kitten, window, radar, silver, garden, puzzle, rocket,
  butter, noon, island, coffee, yellow, planet, summer, letter, bridge, mirror, pepper, forest,
  guitar, sunset, ladder, button, castle, dinner, cherry, turtle, pencil, basket, anchor, violin,
  tiger, lemon, cloud, stone
""")
PARAMS: dict[str, tuple[str, list[str]]] = {
    "I": ("list[int]", words("numbers, values, nums, data, items, scores, readings, xs")),
    "L": ("list[str]", words("strings, names, tokens, entries, labels, words")),
    "s": ("str", words("text, word, s, string")),
    "S": ("str", words("sentence, text, phrase, line, message")),
    "n": ("int", words("n, number, limit, x")),
    "N": ("int", words("n, number, amount, value")),
    "k": ("int", words("k, size, count, step")),
    "c": ("str", words("ch, letter, char")),
    "y": ("int", words("year, y")),
    "D": ("dict[str, int]", words("scores, stock, counts, prices, table, inventory")),
    "M": ("list[list[int]]", words("matrix, grid, rows, table")),
}


def _collatz(n: int) -> int:
    """Count the steps of the Collatz process from n to 1."""
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


def _argument(kind: str, rng: random.Random) -> Any:
    """Draw one example argument of a kind."""
    pick = rng.sample(CODE_WORDS, 5)
    draws: dict[str, Callable[[], Any]] = {
        "I": lambda: [rng.randint(1, 30) for _ in range(rng.randint(4, 6))] + [rng.randint(31, 40)],
        "L": lambda: pick[: rng.randint(3, 5)],
        "s": lambda: pick[0],
        "S": lambda: " ".join(pick[: rng.randint(3, 5)]),
        "n": lambda: rng.randint(5, 24),
        "N": lambda: rng.randint(70, 2500),
        "k": lambda: rng.randint(2, 5),
        "c": lambda: rng.choice("aeorn"),
        "y": lambda: rng.choice([1900, 1987, 2000, 2023, 2024, 1776, 1601]),
        "D": lambda: dict(zip(pick[:3], rng.sample(range(2, 40), 3), strict=True)),
        "M": lambda: [[rng.randint(0, 9) for _ in range(3)] for _ in range(rng.randint(2, 3))],
    }
    return draws[kind]()


def code_prompt(spec: Spec, variant: int, rng: random.Random) -> str:
    """Build one code prompt from a function spec."""
    names, kinds, result, descriptions, reference = spec
    name = names.split("|")[variant % 2]
    params: list[str] = []
    for kind in kinds:
        params.append(rng.choice([p for p in PARAMS[kind][1] if p not in params]))
    text = rng.choice(descriptions.split("|"))
    calls = []
    for _ in range(rng.choice([1, 2, 2, 3])):
        args = [_argument(kind, rng) for kind in kinds]
        shown = ", ".join(map(repr, args))
        calls.append((f"{name}({shown})", repr(reference(*args))))
    if variant % 5 == 4:
        bare = text.format(*(f"`{p}`" for p in params))
        ask = rng.choice(
            [
                "Write a Python function `{f}` with {p}. {d}",
                "Write a Python function called {f} that takes {p}. {d}",
                "I need a Python function named `{f}` taking {p}. {d} Please explain the code "
                "briefly.",
                "Implement `{f}` in Python; it takes {p}. {d} Add a docstring.",
            ]
        )
        listed = " and ".join(f"`{p}` ({PARAMS[k][0]})" for p, k in zip(params, kinds, strict=True))
        tail = rng.choice(
            [
                "",
                f" For example, `{calls[0][0]}` should return `{calls[0][1]}`.",
                f"\n\nExample: {calls[0][0]} -> {calls[0][1]}",
            ]
        )
        return ask.format(f=name, p=listed, d=bare) + tail
    typed = ", ".join(f"{p}: {PARAMS[k][0]}" for p, k in zip(params, kinds, strict=True))
    head = f"def {name}({typed}) -> {result}:"
    if rng.random() < 0.25:
        head = f"def {name}({', '.join(params)}):"
    elif rng.random() < 0.4 and "[" in head:
        caps = head.replace("list[", "List[").replace("dict[", "Dict[")
        used = [t for t in ("Dict", "List") if t + "[" in caps]
        head = f"from typing import {', '.join(used)}\n\n\n{caps}"
    style = rng.randrange(3)
    lines = []
    for call, value in calls:
        if style == 0:
            lines += [f">>> {call}", value]
        elif style == 1:
            lines.append(f"{call} == {value}")
        else:
            lines.append(f"{call} returns {value}")
    if style:
        lines.insert(0, rng.choice(["Examples:", "For example:", "Example:"]))
    quote = rng.choice(['"""', '"""', "'" * 3])
    body = "\n".join("    " + line for line in lines)
    doc = text.format(*params)
    lead = rng.choice(
        [
            "Complete the code I provided.",
            "Complete the code I provided.",
            "Complete the following Python function.",
            "Finish this function.",
            "Fill in the body of this function.",
            "Complete the code I provided. Return only code.",
        ]
    )
    fence = rng.random() < 0.3
    code = f"{head}\n    {quote}{rng.choice(['', ' '])}{doc}\n{body}\n    {quote}"
    return f"{lead}\n\n" + (f"```python\n{code}\n```" if fence else code)


HAND_CODE = block('''
Write a Python function that checks whether the brackets (), [] and {} in a string are balanced.
Write a Python function that reads a CSV file and returns the average of the column called
  "price".
Complete the code I provided.<nl><nl>class Stack:<nl>    def __init__(self):<nl>        self.items
  = []<nl><nl>    def push(self, item):<nl>        # add item to the top<nl><nl>    def
  pop(self):<nl>        # remove and return the top item, or None if empty
Write a Python class BankAccount with deposit, withdraw and balance, refusing withdrawals that are
  too large.
What is wrong with this code, and how do I fix it?<nl><nl>def mean(xs):<nl>    total = 0<nl>
  for x in xs:<nl>        total =+ x<nl>    return total / len(xs)
Explain what this line does: result = {k: v for k, v in pairs if v is not None}
Write a function in Python that returns the n-th row of Pascal's triangle.
Complete the code I provided.<nl><nl>def roman_to_int(s: str) -> int:<nl>    """ Convert a Roman
  numeral to an integer.<nl>    >>> roman_to_int("XIV")<nl>    14<nl>    """
Complete the code I provided.<nl><nl>def binary_search(items, target):<nl>    """ Return the index
  of target in the sorted list items, or -1.<nl>    >>> binary_search([1, 4, 9], 9)<nl>    2<nl>
  """
Write a Python script that renames all .txt files in a folder by adding today's date in front of
  the name.
How do I remove an item from a list while looping over it in Python? Show a safe way.
Complete the code I provided.<nl><nl>def days_between(d1: str, d2: str) -> int:<nl>    """ Return
  the number of days between two dates given as 'YYYY-MM-DD'.<nl>    >>>
  days_between("2023-01-01", "2023-01-31")<nl>    30<nl>    """
Write a recursive Python function that sums all numbers in a list that may contain other lists.
Write a Python generator that yields the squares of 1, 2, 3 and so on without end.
Convert this loop to a list comprehension:<nl><nl>out = []<nl>for w in names:<nl>    if
  w.startswith("A"):<nl>        out.append(w.lower())
Write a Python decorator that prints how long a function took.
Complete the code I provided.<nl><nl>def valid_password(pw: str) -> bool:<nl>    """ A password is
  valid if it has at least 8 characters, a digit and a capital letter.<nl>    >>>
  valid_password("Sunny2day")<nl>    True<nl>    """
Write a Python function that rolls two dice n times and returns how often each total came up.
Write a SQL query that lists the ten customers with the most orders.
Write a bubble sort in Python with a comment on every step.
What is the difference between a tuple and a list in Python? Give a short example.
Complete the code I provided.<nl><nl>def spiral(matrix):<nl>    """ Return the elements of matrix
  in clockwise spiral order.<nl>    >>> spiral([[1, 2], [3, 4]])<nl>    [1, 2, 4, 3]<nl>    """
Write a small Python program that asks the user to guess a number between 1 and 50 and says higher
  or lower.
Write a JavaScript function that removes all spaces from a string.
Complete the code I provided.<nl><nl>def power_set(s: list) -> list:<nl>    """ Return all
  sublists of s, keeping the order.<nl>    >>> power_set([1, 2])<nl>    [[], [1], [2], [1, 2]]<nl>
  """
Write unit tests with pytest for a function add(a, b) that also handles strings.
Write a Python function that counts the lines, words and characters of a text file.
Complete the code I provided.<nl><nl>def change(amount: int, coins: list[int]) -> int:<nl>    """
  Return the smallest number of coins that make up amount, or -1.<nl>    >>> change(11, [1,
  5])<nl>    3<nl>    """
Fix the bug in this function so that it works for empty lists:<nl><nl>def first_and_last(xs):<nl>
  return xs[0], xs[-1]
Write a Python function that turns a list of (name, age) tuples into a dictionary and skips
  repeated names.
Complete the code I provided.<nl><nl>def is_valid_ip(address: str) -> bool:<nl>    """ Check that
  address is four numbers from 0 to 255 separated by dots.<nl>    >>>
  is_valid_ip("192.168.1.300")<nl>    False<nl>    """
Write a regular expression that matches times such as 09:45 or 23:10, and explain it.
Write a Python class Rectangle with area and perimeter methods and a readable __repr__.
Complete the code I provided.<nl><nl>def levenshtein(a: str, b: str) -> int:<nl>    """ Return the
  edit distance between a and b.<nl>    >>> levenshtein("cat", "cut")<nl>    1<nl>    """
Write an HTML page with a heading, a paragraph and a table of three fruits and their prices.
Write a Python function which downloads nothing, but splits a URL into host, path and query by
  hand.
Complete the code I provided.<nl><nl>class Queue:<nl>    """ A first-in, first-out queue.
  """<nl><nl>    def __init__(self):<nl>        self._data = []<nl><nl>    def enqueue(self, x):
Explain what recursion is, with a Python example that counts down from 5.
Write a Python function that returns the most common word in a text, ignoring case and
  punctuation.
Complete the code I provided.<nl><nl>def tic_tac_toe_winner(board):<nl>    """ board is a list of
  three strings such as "XOX". Return "X", "O" or None.<nl>    """
Write a Python function that merges overlapping intervals, for example [(1, 3), (2, 5)] becomes
  [(1, 5)].
Write a bash one-liner that counts the .py files in the current directory and below.
Write a Python function to compute the area of a polygon from its corner points.
Complete the code I provided.<nl><nl>def parse_key_values(text: str) -> dict[str, str]:<nl>    """
  Parse 'a=1;b=2' into a dictionary.<nl>    >>> parse_key_values("a=1;b=2")<nl>    {'a': '1', 'b':
  '2'}<nl>    """
How do I handle the case that a file does not exist in Python? Show code with try and except.
Write a linked list in Python with append and reverse methods.
Write a Python function that simulates a traffic light and returns the next colour.
Complete the code I provided.<nl><nl>def max_depth(tree):<nl>    """ tree is None or a tuple
  (left, value, right). Return its depth.<nl>    >>> max_depth((None, 3, None))<nl>    1<nl>
  """
Write a Python function that prints a multiplication table up to n with aligned columns.
Rewrite this function so that it has clear names:<nl><nl>def f(a, b):<nl>    c = a * b / 100<nl>
  return a - c
Write a Python function that draws a random password of a given length with letters and digits.
Complete the code I provided.<nl><nl>def missing_number(nums: list[int]) -> int:<nl>    """ nums
  holds all numbers from 0 to n except one. Return the missing one.<nl>    >>> missing_number([0,
  1, 3])<nl>    2<nl>    """
Write a C program that prints the numbers from 10 down to 1.
What does the zip function do in Python? Give two examples.
Write a Python function that takes a list of dictionaries and sorts it by the key "date" and then
  "name".
Complete the code I provided.<nl><nl>def knight_moves(x: int, y: int) -> list[tuple[int,
  int]]:<nl>    """ Return all squares a knight at (x, y) can reach on an 8 by 8 board, numbered
  from 0. """
Write a Python function that converts a number from 0 to 99 into English words.
Write pseudocode for looking up a word in a paper dictionary, then the same in Python.
Complete the code I provided.<nl><nl>def water_bill(litres: int) -> float:<nl>    """ The first
  100 litres are free, the next 200 cost 0.02 each, and all others 0.05 each.<nl>    >>>
  water_bill(150)<nl>    1.0<nl>    """
Write a Python function that checks a 9 by 9 Sudoku grid for repeated digits.
Use a dictionary in Python to count how many times each guest ordered coffee, given a list of
  (guest, drink) pairs.
''')


SLOTS |= {
    "work": words("""
Hamlet, Don Quixote, Pride and Prejudice, War and Peace, The Odyssey, Frankenstein, Moby-Dick,
  Dracula, Les Misérables, Jane Eyre, The Great Gatsby, Nineteen Eighty-Four, Faust, The Divine
  Comedy, Alice's Adventures in Wonderland, Treasure Island, Crime and Punishment, The Hobbit, To
  Kill a Mockingbird, Brave New World, The Metamorphosis, Macbeth, The Old Man and the Sea, One
  Hundred Years of Solitude, The Little Prince, Lord of the Flies, Great Expectations, Anna
  Karenina, The Stranger, Things Fall Apart
"""),
    "film": words("""
Jaws, Titanic, Psycho, Casablanca, Avatar, Jurassic Park, The Godfather, Star Wars, Toy Story,
  Gladiator, Inception, The Matrix, Forrest Gump, Alien, Rocky, Finding Nemo, Vertigo, Pulp
  Fiction, The Lion King, King Kong, Blade Runner, Spirited Away, Parasite, Schindler's List, Back
  to the Future, The Wizard of Oz, Goldfinger, Metropolis, Singin' in the Rain, Amadeus
"""),
    "invention": words("""
telephone, steam engine, light bulb, printing press, World Wide Web, radio, telescope, microscope,
  dynamite, aeroplane, vaccine, thermometer, photography, typewriter, transistor, helicopter,
  safety pin, zip fastener, ballpoint pen, refrigerator, television, elevator brake, lightning
  rod, barometer, sewing machine, computer mouse, X-ray machine, parachute, compass, battery
"""),
    "element": words("""
gold, silver, iron, oxygen, hydrogen, helium, carbon, sodium, potassium, lead, mercury, tin,
  copper, zinc, nitrogen, chlorine, neon, calcium, uranium, silicon, tungsten, sulfur, phosphorus,
  nickel, aluminium, iodine
"""),
    "person": words("""
Marie Curie, Isaac Newton, Cleopatra, Nelson Mandela, Leonardo da Vinci, Albert Einstein, Galileo
  Galilei, Charles Darwin, Frida Kahlo, Mozart, Beethoven, Napoleon, Julius Caesar, Mahatma
  Gandhi, Joan of Arc, Abraham Lincoln, Ada Lovelace, Alan Turing, Florence Nightingale, Marco
  Polo, Genghis Khan, Neil Armstrong, Rosa Parks, Shakespeare, Vincent van Gogh, Pablo Picasso,
  Alexander the Great, Nikola Tesla, Louis Pasteur, Johann Sebastian Bach, Socrates, Confucius,
  Queen Victoria, Christopher Columbus, Ferdinand Magellan, Michelangelo, Claude Monet, Winston
  Churchill, Martin Luther King Jr., Amelia Earhart
"""),
    "happening": words("""
World War I, World War II, the French Revolution, the American Civil War, the fall of the Berlin
  Wall, the first Moon landing, the Great Fire of London, the sinking of the Titanic, the Russian
  Revolution, the Battle of Waterloo, the Black Death in Europe, the signing of Magna Carta, the
  Chernobyl disaster, the Battle of Hastings, the Cuban Missile Crisis, the eruption of Vesuvius
  that buried Pompeii, the California Gold Rush, the Boston Tea Party, the Industrial Revolution,
  the Wall Street Crash, the first modern Olympic Games, the Spanish Civil War, the Korean War,
  the partition of India, the Apollo 13 mission
"""),
    "river": words("""
Nile, Amazon, Danube, Mississippi, Ganges, Rhine, Yangtze, Volga, Thames, Seine, Congo, Mekong,
  Niger, Zambezi, Tigris, Colorado, Rio Grande, Indus, Po, Loire
"""),
    "sport": words("""
basketball, football, tennis, cricket, baseball, ice hockey, rugby, volleyball, golf, badminton,
  table tennis, water polo, handball, curling, fencing, judo, rowing, snooker, netball, boxing
"""),
    "instrument": words("""
violin, cello, oboe, harp, trumpet, tuba, clarinet, flute, guitar, banjo, piano, organ, accordion,
  saxophone, xylophone, bagpipes, sitar, ukulele, trombone, bassoon
"""),
    "planet": words("Mercury, Venus, Mars, Jupiter, Saturn, Uranus, Neptune, the Earth"),
    "landmark": words("""
Eiffel Tower, Taj Mahal, Colosseum, Great Wall, Machu Picchu, Statue of Liberty, Big Ben, Sydney
  Opera House, Acropolis, Golden Gate Bridge, Alhambra, Angkor Wat, Petra, Stonehenge, Mount
  Rushmore, Brandenburg Gate, Burj Khalifa, Louvre, Sagrada Familia, Kremlin, Great Sphinx,
  Leaning Tower, Hagia Sophia, Christ the Redeemer statue, Uffizi Gallery
"""),
    "organ": words("""
heart, liver, kidneys, lungs, stomach, pancreas, spleen, brain, skin, small intestine, gall
  bladder, thyroid gland, retina, inner ear, spinal cord, bone marrow
"""),
    "gadget": words("""
router, GPS receiver, microwave oven, smartphone, hard disk, solar panel, barcode scanner, 3D
  printer, touchscreen, modem, jet engine, lithium battery, laser, drone, QR code, search engine,
  graphics card, web browser, firewall, operating system, heat pump, wind turbine,
  noise-cancelling headphone, electric motor
"""),
    "artist": words("""
the Beatles, Queen, ABBA, Elvis Presley, Michael Jackson, Bob Dylan, Miles Davis, Louis Armstrong,
  Madonna, David Bowie, the Rolling Stones, Johnny Cash, Aretha Franklin, Bob Marley, Pink Floyd,
  Vivaldi, Chopin, Tchaikovsky, Verdi, Handel, Debussy, Schubert, Nina Simone, Ella Fitzgerald,
  Stevie Wonder
"""),
    "food": words("""
sushi, paella, pizza, goulash, kimchi, hummus, tacos, couscous, croissants, pad thai, pho,
  ceviche, borscht, feta cheese, haggis, moussaka, fondue, tofu, baklava, poutine
"""),
}

QA = block("""
What is the [capital|official language|currency|largest city|highest mountain|longest river] of
  {country}?
Which [continent|ocean or sea] is {country} [in|closest to]?
Which countries [share a border with|are neighbours of] {country}?
What is {country} [best known for|famous for]?
What colours are on the flag of {country}?
[About how many people live in {country}?|What is the population of {country}?|What is the main
  religion in {country}?|What is the climate of {country} like?]
Name [a national park|a famous city|a traditional dish|a well-known writer|a famous athlete] from
  {country}.
Who [wrote|is the author of] {work}?
[When|In which century] was {work} [written|first published]?
[Where is {work} set?|Who is the main character of {work}?|What is {work} about?|What genre is
  {work}?]
Who directed the film {film}?
[In which year did {film} come out?|Who played the lead in {film}?|What is the plot of {film} in
  one sentence?|What genre of film is {film}?]
Who invented the {invention}?
[When|In what year|In which country] was the {invention} invented?
What is the [chemical symbol|atomic number|melting point] [for|of] {element}?
[What is {element} used for?|Is {element} a metal?|Who discovered {element}?|Where is {element}
  found in nature?]
[Who was|What is known about] {person}?
[When was|Where was|In which country was] {person} born?
What is {person} [famous for|remembered for|best known for]?
[When did {person} die?|What language did {person} speak?|In which century did {person} live?|Name
  one achievement of {person}.]
When [was|did people first hear of] {happening}?
[What caused {happening}?|Which countries were involved in {happening}?|What was the result of
  {happening}?|Where did {happening} take place?|Why is {happening} important?]
[Which sea or ocean does the {river} flow into?|Where does the {river} begin?|Which cities lie on
  the {river}?|On which continent is the {river}?|How long is the {river}?]
[How many players are on a {sport} team?|Where was {sport} invented?|How do you score in
  {sport}?|Who is a famous {sport} player?|What equipment do you need for {sport}?|How long does a
  match of {sport} last?]
[How many strings or keys does a {instrument} have?|To which family of instruments does the
  {instrument} belong?|How is sound made on the {instrument}?|Name a piece that was written for
  the {instrument}.]
[How many moons does {planet} have?|How long is a year on {planet}?|What is {planet} made of?|How
  far is {planet} from the Sun?|Who or what is {planet} named after?|How hot is it on {planet}?]
[Where is the {landmark}?|Who designed the {landmark}?|When was the {landmark} built?|How old is
  the {landmark}?|Why was the {landmark} built?]
[What does the {organ} do?|Where in the body is the {organ}?|What happens if the {organ} stops
  working?|Which doctor treats the {organ}?]
[What is a {gadget}?|How does a {gadget} work?|Who developed the first {gadget}?|What is a
  {gadget} used for?]
[What kind of music is {artist} known for?|Name a famous piece by {artist}.|Where was {artist}
  from?|When was {artist} active?]
[Which country does {food} come from?|What is {food} made of?|How is {food} usually eaten?|Is
  {food} vegetarian?]
What do {animal}s eat?
[Where do {animal}s live?|How long does a {animal} live?|What is a group of {animal}s called?|What
  is a baby {animal} called?|How much does an adult {animal} weigh?|Is the {animal} a mammal?]
""")

HAND_QA = block("""
Who was the first person to walk on the Moon?
What gas do plants take in from the air?
How many teeth does an adult human usually have?
Which ocean is the largest?
Why do cats purr?
What is the hardest natural substance?
Who painted the Mona Lisa?
Which planet has the biggest rings?
How many minutes are there in a day?
What does DNA stand for?
Which language has the most native speakers?
Who composed the Four Seasons?
When did women first get the vote in New Zealand?
What is the smallest country in the world?
Which metal is liquid at room temperature?
How often are the Summer Olympics held?
What is the difference between a crocodile and an alligator?
Which city hosted the 2012 Summer Olympics?
Who wrote the music for Star Wars?
Where do penguins live in the wild?
How many degrees are there in a right angle?
Which blood type is called the universal donor?
Who was the first emperor of Rome?
What was the name of the ship that took the Pilgrims to America in 1620?
How fast does sound travel in air?
Which desert is the largest hot desert?
What does CPU stand for?
What causes thunder?
Which three colours of light do screens use?
Who discovered the planet Uranus?
What is the main ingredient of glass?
In which sport is a shuttlecock used?
How many sides does a hexagon have?
Which country gave the Statue of Liberty to the United States?
What do you call a scientist who studies rocks?
Who is the detective in the stories by Arthur Conan Doyle?
What are the three states of matter?
Which animal is the tallest on land?
What was the Rosetta Stone used for?
What is the square root of 169?
Which war ended with the Treaty of Versailles?
Why is the Dead Sea so salty?
What is the name of the process by which a caterpillar becomes a butterfly?
In which ocean is Madagascar?
Who was the Greek god of the sea?
How many time zones does China officially use?
What is the most common gas in the air we breathe?
When was the first email sent?
Which vitamin do we get from sunlight?
What was the first feature-length animated film by Disney?
Which chess piece can only move diagonally?
Who was president of the United States during the Civil War?
What is the study of earthquakes called?
Which instrument has 88 keys?
What is the currency of Japan?
Where were the first modern Olympic Games held?
Who developed the theory of general relativity?
Why do we have leap years?
What do bees make besides honey?
What does the term "open source" mean?
Which river runs through London?
""")


ASKS = block("""
Summarize: @
Summarize the following text.<nl><nl>@
Summarize this passage in [one|two|three] sentences:<nl><nl>@
@<nl><nl>TL;DR:
@<nl><nl>TL;DR
@<nl><nl>Give a brief summary of the text above.
@<nl><nl>Summarize the text above in one sentence.
Please write a short summary of this text.<nl><nl>@
What are the main points of the following text?<nl><nl>@
Give the key points of this text as a bulleted list:<nl><nl>@
Write a headline and a one-sentence summary for this text:<nl><nl>@
Condense the following into no more than [30|40|50|60] words.<nl><nl>@
In a few words, what is this text about?<nl><nl>"@"
Provide a concise summary of the passage below.<nl><nl>Passage: @<nl><nl>Summary:
Text: @<nl><nl>Summary:
Can you sum this up for someone in a hurry?<nl><nl>@
Shorten this text to its most important facts:<nl><nl>@
Read the text and say in two sentences what happened or what it explains.<nl><nl>@
Summarize the text below in simple words for a child.<nl><nl>@
""")

BANK_TEXT = block("""
# flood
Heavy rain on {day1} [flooded|swamped] large parts of {town1}, forcing {n:40-900*10} people to
  leave their homes. || More than {n:40-900*10} residents of {town1} spent the night in shelters
  after the river burst its banks early on {day1}.
The water rose by {m:2-5} metres in less than {h:3-9} hours, which engineers called the fastest
  rise since {y:1931-1998}. || Officials said that nearly {h:30-95*5} millimetres of rain fell
  between midnight and dawn.
Firefighters used [rubber boats|borrowed tractors|army trucks] to bring families, pets and
  medicine out of the low streets around the old market. || Volunteers carried sandbags through
  the dark to protect the hospital and the water works.
"[We heard a noise like a train, and then the cellar was full|I have lived here all my life and
  never saw it climb above the bridge|The children thought it was an adventure, but I was
  shaking]," said {name1} {surname1}, a {job1} who lives near the river.
[No deaths were reported|One man was treated for a broken arm|Two people are still missing], but
  {k:12-80} houses were badly damaged and {g:2-6} bridges remain closed. || Power failed in
  {k:300-2000*100} homes and may not return before the weekend.
Schools will stay shut until {day2}, and trains on the line to {town2} have been replaced by
  buses.
Mayor {name2} {surname2} promised ${c:2-9} million in emergency aid and asked the national
  government for help. || The town council met overnight and released ${c:2-9} million for
  repairs.
Critics pointed out that a new dam, planned {w:6-20} years ago, was never built because of a
  dispute over its cost. || Experts had warned in {month1} that the drains were too small for
  storms of this size.
A council spokesman answered that [no dam could have held back so much water|work on the drains
  would begin next spring|the plan would be discussed again next month].
Forecasters expect drier weather from {day2}, although a second band of rain may reach the hills
  at the end of the week.
# school
A primary school in {town1} has [banned homework|replaced its timetable|given up bells|moved its
  lessons outdoors] for one year as part of an experiment. || Pupils at a school in {town1} are
  taking part in an unusual trial: no homework at all until {month1}.
Instead of worksheets, the {n:120-480*20} children are asked to spend their free time on reading,
  {hobby1} or helping at home.
The idea came from head teacher {name1} {surname1}, who noticed that [tired pupils learned little
  on Mondays|many families argued about homework every evening|the weakest pupils gained nothing
  from extra tasks].
"We are not lowering our standards," {surname1} said. "We are asking what really works." || "If
  the results drop, we will stop at once," the head teacher told parents in a letter.
Early numbers are [encouraging|mixed|better than expected]: {p:55-90}% of the parents say that
  their children are calmer, and absences fell by {q:5-30}%. || After {w:6-16} weeks, test scores
  in maths were unchanged, while reading scores rose by {q:3-12}%.
Not everybody is convinced. {name2} {surname2}, a {job1} and father of two, fears that pupils will
  struggle later at secondary school.
A rival school in {town2} even doubled its homework last year and saw its results climb.
Researchers at the nearby university will [compare both schools|interview every family|test the
  pupils three times a year] and publish a report in {month2}.
One of them warned that a single school is too small for firm conclusions, because teachers who
  volunteer for a trial are often unusually keen.
For the children the matter is simpler. [A nine-year-old said that she had learned to cook
  {dish1}|One boy said he now finishes a book every week|One girl admitted that she missed the
  spelling lists], and her friends nodded.
# discovery
Divers have found the wreck of a {n:100-400*20}-year-old ship off the coast near {town1}. || A
  team of archaeologists has uncovered the remains of a Roman villa under a car park in {town1}.
  || Workers digging a tunnel in {town1} have come across a forgotten cemetery.
The find was made by chance on {day1}, when a {job1} noticed [a line of dark timber|a piece of
  coloured stone|the edge of a bronze bowl] in the mud.
{name1} {surname1}, who leads the excavation, called it "[the best thing I have seen in thirty
  years|a window into ordinary life|a puzzle with half of the pieces missing]".
So far {k:40-900*10} objects have been recorded, among them coins, combs, a {thing1} made of bone
  and several sealed jars. || The most striking object is a small ivory {animal1}, no bigger than
  a thumb, which was probably a toy.
Tests on the wood show that the trees were cut down in winter, most likely in what is now
  {country1}. || Chemical traces in the jars suggest that they once held olive oil and fish sauce.
That surprised historians, who had thought that trade with this region stopped at least a century
  earlier.
Work has to be quick, since [the tide covers the site twice a day|building is due to start again
  in {month1}|the damp objects begin to crumble when they dry].
The items are being kept in cold water and will later be moved to a laboratory in {town2}. || Each
  piece is photographed, numbered and packed in wet foam before it leaves the site.
The regional museum hopes to show them to the public in {w:2-5} years but still needs
  ${c:200-900*50},000 for the display.
Meanwhile the police have asked visitors to stay away after two men with metal detectors were
  caught there at night.
# beekeeping
Honeybees live in colonies of up to {n:30-60*10},000 insects, nearly all of them female workers.
  || A beehive looks chaotic, but almost every insect in it follows a strict plan.
At the centre is the queen, whose main task is to lay eggs, as many as {k:1000-2000*100} on a warm
  day in {month1}.
Workers change jobs as they grow older: they first clean cells, then feed the young, later build
  comb and guard the entrance, and only at the end of their lives fly out to collect food.
A worker that finds a rich patch of flowers comes home and performs a dance. The angle of the
  dance shows the direction in relation to the sun, and its length shows the distance.
To make one jar of honey, the bees of a hive must visit about {m:2-4} million flowers. || A single
  bee produces less than a tenth of a teaspoon of honey in her whole life.
Nectar is mostly water, so the bees fan it with their wings until it is thick enough to keep
  through the winter.
In the cold months they do not sleep. They form a tight ball around the queen, shiver to create
  heat and take turns on the chilly outside.
Farmers value bees less for honey than for pollination. Apples, almonds and pumpkins would give
  poor harvests without them. || In {country1}, growers rent hives by lorry and move them from
  field to field with the season.
In recent years many colonies have died. Mites, pesticides and the loss of wild flowers are all
  blamed, and researchers believe that they do the most harm in combination.
Gardeners can help by planting flowers that bloom at different times and by leaving a corner of
  the lawn unmown. || {name1} {surname1}, a {job1} who keeps {h:3-12} hives, advises beginners to
  spend a year with an experienced keeper first.
# minutes
Minutes of the meeting of the {town1} [Residents' Association|Sports Club|Library Friends|Garden
  Society], held on {day1}, {d:1-28} {month1}. Present were {n:8-30} members; {name1} {surname1}
  was in the chair.
The minutes of the last meeting were approved with one correction: the cost of the new {thing1}
  was ${c:60-400*10}, not ${e:410-900*10}.
The treasurer, {name2} {surname2}, reported a balance of ${b:1200-9000*100}. Income from the
  summer fair was [higher|lower] than last year because of the [fine|poor] weather. || The
  treasurer said that {k:4-15} members had not yet paid their fees and would be sent a reminder.
There was a long discussion about [the broken heating|parking on the grass|noise after ten in the
  evening|the leaking roof]. Two firms have been asked for prices, and the cheaper offer was
  ${g:700-3900*100}.
{name3} proposed accepting it at once. {name4} preferred to wait for a third offer. The vote was
  {v:9-15} to {w:2-8} in favour of [accepting|waiting].
The trip to {town2} will take place in {month2}. The bus has {s:30-50} seats, of which {r:8-29}
  have been booked. Members may bring one guest for ${t:10-25}.
{name4} asked for help with the newsletter, since the present editor is moving to {country1}.
  [Nobody came forward|{name3} agreed to try it for six months|It was agreed to ask a local
  {job1}].
It was noted that the {thing2} in the kitchen has gone missing again. Members are reminded to sign
  for anything they borrow.
Under other business, a member praised the volunteers who planted {q:40-200*20} bulbs along the
  path. || Under other business, it was suggested that {hobby1} be offered on {day2} evenings. The
  committee will look into it.
The next meeting is on {day2} at seven o'clock. The chair closed the meeting at
  {h:8-9}:{x:10-50*5} p.m.
# diary
{day1}. I woke at five because the {animal1} was making a noise outside the tent, and after that
  there was no hope of sleep. || {day1}, and my third week in {country1}. I still wake up not
  knowing where I am.
It had rained all night, and everything I own is now damp, including the bread. || The room is
  small and bright, with a view of a wall on which somebody has painted a huge {animal1}.
{name1} says that one gets used to it after a month. {name1} has been here for {n:2-9} years and
  owns exactly one chair.
After breakfast we walked to the {place1}, where I was to start work as a {job1}. The way takes
  {k:20-50*5} minutes if you do not get lost, and I got lost twice.
My boss, a quiet person called {surname1}, gave me a {thing1} and a pile of papers and
  disappeared. || Nobody had told them that I was coming. They were kind, brought me tea and tried
  to guess my age.
By noon I had made two mistakes, one of them expensive. I expected shouting, but they only laughed
  and told me about the time somebody [locked the boss in the cellar|sent all the {things1} to
  {town1}|painted the wrong house].
In the afternoon the power went out. We sat by the window and talked about our families, and for
  the first time I forgot to be homesick.
I learned {m:4-12} new words today, among them the ones for "tomorrow", "{thing2}" and "it does
  not matter". The last seems to be the most useful.
On the way home I bought {dish1} from a woman on the corner. She refused to take my money when she
  heard that it was my first day.
Tonight I should write to {name2}, but what would I say? That I am tired and wet and, strangely,
  happy? || I meant to give up and book a ticket home this morning. Now I think I will give it
  until {month1}.
# business
{surname1} & {surname2}, [a family firm|a maker of {things1}|a furniture company|a chain of
  bakeries] based in {town1}, will close {n:2-9} of its {m:12-40} shops by {month1}. || The
  {town1} company {surname1} & {surname2}, known for its {things1}, has been sold to an investor
  from {country1}.
About {j:60-800*20} jobs are affected, although the management hopes to move half of the staff to
  other places.
Sales fell by {p:5-25}% last year to ${s:12-90} million, and the loss grew to ${l:1-6} million. ||
  The firm reported sales of ${s:12-90} million, slightly more than a year earlier, but its costs
  rose twice as fast.
Chief executive {name1} {surname1} blamed [higher energy prices|cheap goods sold online|rising
  rents|the weak summer] and "[our own slowness|a few bad decisions|a market that changed
  overnight]".
The company was founded in {y:1890-1975} by {surname1}'s grandfather, who sold his goods from a
  cart. At its peak it had shops in {k:4-9} countries.
Workers learned of the plan from an email on {day1} morning. "[After twenty years I would have
  liked a handshake|We saw it coming, but it still hurts|I have a mortgage and two children],"
  said {name2}, a {job1} at the main site.
The union has called for a meeting and does not rule out a strike. It says that ${c:2-5} million
  was paid to shareholders only last {month2}.
Analysts see some hope in the online business, which now makes up {q:15-45}% of sales and is
  growing. || Competitors have had similar trouble: two rivals gave up in the past eighteen
  months.
The new plan is to concentrate on fewer and better products, to repair old goods for customers and
  to open a small workshop that visitors can watch.
Shares [dropped by {r:3-18}%|rose by {r:3-12}%|hardly moved] after the news. Detailed figures will
  be published on {day2}.
# science
Eating [late|quickly|alone|in front of a screen] may change how well we [sleep|remember
  things|concentrate], a study from {country1} suggests. || A short walk after lunch may improve
  memory, according to researchers in {country1}. || Listening to birdsong lowers stress more than
  silence does, a new study has found.
The team, led by {name1} {surname1}, followed {n:80-900*20} adults between {a:18-30} and {b:60-80}
  years of age for {w:6-20} weeks.
The volunteers were divided into two groups at random. One group kept its habits, and the other
  followed a simple rule every day and noted it in an app.
All of them took the same tests at the beginning and at the end. They also wore a small sensor at
  night, which recorded their heartbeat.
On average, the second group did {p:6-24}% better than the first. The difference was largest among
  people over fifty. || The effect was modest but steady: about {p:6-19}% after a month, and no
  more than that later on.
The reason is not clear. {surname1} suspects that [the body clock is involved|blood flow to the
  brain plays a part|people simply paid more attention to themselves].
"[We were surprised ourselves|It is not a miracle cure, but it is free|We had expected the
  opposite]," the scientist said.
Other experts are careful. {name2} {surname2}, who had no part in the study, pointed out that
  {k:12-40} people dropped out and that those who stayed may have been especially motivated.
The work was paid for in part by a company that sells [fitness watches|health food|mattresses],
  but the authors say that it had no influence on the results.
A larger trial with {m:2-9},000 people will start in {month1}. Until then, the researchers advise,
  nobody should change their medicine because of the findings.
# town plan
The council of {town1} wants to close the town centre to cars from {month1}. || {town1} is to get
  a tram line again, {n:40-80} years after the last one was torn up. || A plan to turn the old
  factory in {town1} into {k:80-400*20} flats has divided the town.
The project would cost ${c:12-90} million, of which the state would pay {p:30-70*10}%. Work could
  begin in {month2} and take {y:2-5} years.
Supporters say that the air would be cleaner, that children could walk to school safely and that
  more visitors would come. || Supporters argue that young families are leaving because they
  cannot find anywhere to live.
They point to {town2}, where a similar step was first hated and is now so popular that nobody
  wants to go back.
Shop owners are worried. {name1} {surname1}, a {job1} with a business on the main street, fears
  losing {q:10-40}% of all customers during the building work alone.
At a public meeting on {day1}, which drew {m:150-600*50} people, the mood was tense. Several
  speakers were booed, and one {job2} left the hall in protest.
Mayor {name2} {surname2} promised [free parking at the edge of town|a fund for shops in trouble|a
  test phase of six months|more trees than in the first plan].
An independent report found that traffic on the ring road would grow by {r:5-25}%, but that noise
  in the centre would be cut by half. || An independent report called the costs realistic but the
  timetable much too short.
Residents can comment on the plans until the end of {month1}. If {g:2-6},000 signatures are
  collected, there must be a referendum.
A decision was first expected last year, but it was put off because of the election.
# sport
{town1} beat {town2} {a:3-5}-{b:0-2} on {day1} evening to reach the final of the regional cup for
  the first time in {n:9-40} years.
{k:3-9},000 fans saw a match that [began slowly|was decided in the last ten minutes|was stopped
  twice because of fog|turned after a red card].
{town2} took the lead after {m:4-19} minutes, when {surname1} headed in a corner. For a while it
  looked as if the favourites would win easily.
But the home side grew stronger. {name1} {surname2}, a {job1} who trains only three evenings a
  week, levelled the score shortly before the break.
In the second half it was one-way traffic. {name2} scored twice within {c:3-8} minutes, the second
  time from nearly thirty metres.
"[I closed my eyes and hit it|My grandmother told me to shoot more often|I will not sleep
  tonight]," the scorer said, still wet from the celebrations.
The visitors' coach, {name3} {surname3}, complained about a penalty that was not given. "[Everyone
  saw it except one man|We lost our heads after that|That is football]," the coach said.
The club was close to ruin only two years ago, when its main sponsor went bankrupt and players
  washed their own shirts. || Supporters had collected ${d:20-90*10},000 to save the club in the
  spring, selling cakes and old scarves.
One worry remains: captain {surname4} left the pitch with a knee injury and may miss the final.
It will be played in {month1} against the winner of Sunday's other match. Tickets go on sale on
  {day2} and cost between ${e:8-15} and ${f:20-45}.
# volcano
Volcanoes are openings in the crust of the Earth through which molten rock, ash and gas escape. ||
  Few natural events are as impressive as a volcanic eruption, yet most volcanoes are silent for
  centuries.
Below the ground the molten rock is called magma; once it has reached the surface it is known as
  lava.
Most volcanoes lie where two plates of the crust meet. Around the Pacific they form a long curve
  that is called the Ring of Fire. || Some, such as those of Hawaii, lie far from any edge, above
  a hot spot deep in the mantle.
The shape of a volcano depends on its lava. Thin lava flows far and builds wide, gentle slopes;
  thick lava piles up and makes steep cones.
Thick magma also traps gas. When the pressure becomes too great, it explodes like a shaken bottle
  and throws ash up to {n:20-40*5} kilometres high.
The greatest danger is often not lava, which moves slowly, but hot clouds of ash and gas that race
  downhill faster than a car, and mud flows that bury valleys.
Large eruptions can cool the whole planet. After Tambora exploded in 1815, snow fell in summer in
  parts of Europe and North America, and harvests failed.
Scientists watch for signs such as small earthquakes, swelling ground and changes in the gas that
  rises from cracks. They can often warn people days ahead, but never to the minute. || {name1}
  {surname1}, who has climbed {k:20-70} craters, compares the job to that of a {job1}: you listen,
  you measure, and you are still surprised.
In spite of the risk, millions of people live close to volcanoes, because ash makes the soil rich
  and hot water can be used to heat homes.
Islands, mountains and even part of the air we breathe owe their existence to these restless
  mountains.
# lost
When {name1} {surname1} came home from work on {day1}, the door was open and the {animal1} was
  gone. || Nobody in {town1} could say when the stranger with the {thing1} had first come to the
  {place1}.
It was not an ordinary {animal1}. It had belonged to {name1}'s aunt, a retired {job1}, and it
  understood, or seemed to understand, every word that was said in the house.
{name1} searched the garden, the street and the {place2}, asking everyone and showing a blurred
  photograph.
A {job2} remembered seeing something run towards the bridge. A child swore that it had been
  carried off by a tall woman in a green coat.
By evening {n:12-40} neighbours were looking with lamps. Someone brought {dish1}, someone else a
  drum, and for the first time in years people who lived next door to each other learned each
  other's names.
Towards midnight it began to snow. One after another they went home, until only {name1} and old
  {surname2} from the corner were left.
"[Things come back when you stop calling them|I lost something, too, once, and found a wife while
  looking|Listen instead of shouting]," said {surname2}, and sat down on a wall.
They were quiet for a long time. Then, from inside the {place3}, came a faint sound.
It lay there on a pile of sacks, warm and pleased, beside {k:3-6} newborn young. || There it was,
  fast asleep on a pile of {things1}, as though nothing had happened.
{name1} laughed so loudly that windows were opened. The next week the neighbours met again, with
  no reason at all, and they have done so every {day2} since.
# health
A local clinic in {town1} has begun to [prescribe walks in the park|offer cooking lessons|lend out
  {things1}|send patients to a choir] instead of pills for mild cases of stress.
Doctors there saw the number of such patients grow by {p:20-60}% in {n:3-7} years, while the
  waiting time for therapy rose to {w:8-30} weeks.
"[Many of my patients are not ill, but lonely|A pill takes two minutes to prescribe and years to
  give up|I was tired of having nothing to offer]," said {name1} {surname1}, who began the scheme.
People who join meet on {day1} mornings in groups of {k:6-14}. A trained helper goes with them,
  and nobody has to talk about their problems.
{name2}, a {job1} of {a:29-67}, had not left the flat for weeks. "First I came because I had
  promised. Now I come because they would miss me."
In a survey after {m:3-9} months, {q:55-85}% said that they felt better, and visits to the clinic
  fell by a fifth.
The costs are low: about ${c:20-90*5} for each person, less than the price of a single hour of
  therapy.
Specialists warn that the offer is no replacement for treatment in severe cases. "[A walk does not
  cure a depression|We must not save money in the wrong place]," said {name3} {surname2} of the
  university hospital.
The health ministry is interested and will pay for trials in {g:4-12} other towns, including
  {town2}, from {month1} on.
Until then the clinic depends on gifts and on volunteers, of whom there are at present {h:9-40}.
# memo
To all staff: from {d:1-28} {month1} the office in {town1} will use a new system for [booking
  rooms|claiming expenses|planning holidays|ordering supplies].
The old one was introduced {n:8-15} years ago, is no longer supported by its maker and failed
  {k:3-9} times last quarter.
The change will be made on a {day1} evening, and both systems will be offline from {h:5-7} p.m.
  until the next morning. Please save your work before then.
Your user name stays the same, but you will be asked to choose a new password with at least
  {p:10-14} characters at the first login.
Requests that have already been approved will be moved for you. Open requests will not; print them
  or note them down and enter them again.
Short training sessions are held every {day2} in room {r:101-399}. They take {t:30-60*10} minutes,
  and each team should send at least one person. || A short film and a two-page guide can be found
  on the intranet, and {name1} {surname1} will visit each team in the first week.
Managers will see all requests on one page and must answer within {w:2-5} working days. If they do
  not, the request goes to their deputy.
In the test phase, {m:20-60} colleagues tried the system. Most found it faster, though several
  disliked the small print on phones; this will be improved by {month2}.
Please do not send questions by email to the whole department. Ask {name2} {surname2} or call
  extension {e:2000-8999}.
We know that changes cost time and thank you for your patience. We expect to save about
  {s:200-900*50} hours of work a year.
# traveller
{town1} lies [at the mouth of a wide river|between two green hills|on a narrow strip of land|at
  the end of the railway], and most travellers see only its station. They are missing something.
  || Few guidebooks give {town1} more than a line, which is exactly why I went.
The best time to come is {month1}, when the rooms cost half and the {place1} is nearly empty. ||
  Avoid {month1}, when the whole of {country1} seems to be on holiday here.
Begin at the market, held on {day1} and {day2}. Stalls sell {things1}, {things2} and a local form
  of {dish1} that is eaten standing up.
From there a path of {k:2-9} kilometres leads to the old {place2}, built in {y:1480-1890} by a
  rich {job1} for a wife who never came.
The guide, {name1}, knows {n:40-200*10} stories about it and will tell all of them unless asked to
  stop.
For lunch there are three choices. The terrace above the harbour has the view, the inn behind the
  church has the food, and the kiosk has the prices.
The afternoon belongs to the museum of {hobby1}, a mad and lovable collection put together by two
  sisters who did not speak to each other for {m:12-40} years.
There are only {h:3-9} hotels. I stayed with {name2} {surname1}, whose guest room costs
  ${p:30-90*5} including breakfast and the loan of a {thing1}. || Sleep is difficult: the bells
  ring every quarter of an hour, and a {animal1} lives on the roof.
Getting there takes patience. The train from {town2} runs {q:2-5} times a day, and the last one
  goes back at {g:5-8} in the evening.
If you miss it, do not worry. Everybody does so once, and the waiting room has a piano. || Would I
  go again? I have already booked.
# review
I have used the {surname1} {thing1} every day for {n:3-12} weeks now, at home and on a trip to
  {country1}. || When the {thing1} from {surname1} came on the market in {month1}, the advertising
  promised a small revolution. I wanted to see for myself.
It costs ${p:60-390*10}, which is about {q:10-45}% more than similar models by other makers.
The first impression is good. It is light, well made and easy to set up; even my neighbour, a
  {job1} with no love of manuals, managed it in {m:4-15} minutes.
In everyday use, two things stood out. It is very quiet, and the battery lasts for {h:9-40} hours
  rather than the {k:8-20} that are promised. || In everyday use, I liked the large buttons and
  the short cable less than I had expected.
But there are weak points. The lid feels cheap, the app wants to know far too much, and after
  {d:5-20} days a small part came off.
Customer service answered within {e:2-6} days and sent a new part free of charge, with a card
  wishing me a nice {day1}.
I also lent it to three friends. {name1} loved it, {name2} hated the colour, and {name3}, who is
  left-handed, could hardly use it at all.
Compared with its main rival, it is faster but less sturdy, and cleaning it takes twice as long.
Is it worth the money? For people who travel a lot, yes. Everybody else should wait for a sale or
  look at last year's model, which does nearly the same for ${f:30-59}. || All in all I give it
  {s:2-4} out of five stars. With a better lid it would have been one more.
# election
{name1} {surname1}, a {age:24-71}-year-old {job1}, has been elected mayor of {town1} with
  {p:50-63}% of the vote. || In a result that few had predicted, voters in {town1} have rejected
  Mayor {name2} {surname2} after {n:8-20} years in office.
{surname1} had no experience in politics and had spent just ${c:2-9},000 on the campaign, much of
  it on [bus tickets|homemade posters|coffee for voters].
The winner went from door to door every evening for {m:3-8} months, asking only one question: what
  would you repair first?
The answers, {k:900-4000*100} in all, were hung on a washing line in the main square. Most dealt
  with [the broken swimming pool|buses that do not come|the rents|the closed police station].
{name2} {surname2}, who has led the town through two crises, congratulated the winner and said
  that "[the people are never wrong, only sometimes in a hurry|I will sleep well for the first
  time in years|I should have listened more]".
Turnout was {t:58-79}%, the highest since {y:1968-1999}, and rose above all among those under
  thirty.
The new mayor will not have it easy. The town owes ${d:20-90} million, and {surname1}'s list has
  only {s:4-9} of the {v:24-40*2} seats on the council.
Talks with the other groups will begin on {day1}. {name3} {surname3} of the second largest party
  said they were ready to help "where it makes sense".
As a first step, {surname1} wants to give up the official car, put all contracts online and hold
  an open hour every {day2}.
Asked about the party on election night, the {job1} said there had been none, because the next
  shift began at six.
# invention
A [student|retired {job1}|group of pupils|pair of sisters] from {town1} has invented a {thing1}
  that [folds to the size of a book|needs no electricity|is made of old {things1}|warns its owner
  of rain].
The idea arose by accident. {name1} {surname1} was trying to repair a {thing2} when a spring
  jumped out and hit the lamp.
"[I thought I had broken it for good|It did precisely what it should not do|I laughed for five
  minutes, then I fetched a pencil]," {surname1} recalls.
It took {n:14-90} attempts and {m:2-6} years until the device worked. The early ones leaked,
  burned or, in one case, flew out of the window.
The principle is simple: a strip of two metals bends when it gets warm and so moves a lever, with
  no need for a motor or a chip.
Experts at the technical college measured it and found that it uses {p:20-70}% less energy than
  devices in the shops.
A firm in {country1} offered ${c:40-400*20},000 for the patent. {surname1} refused, since the firm
  meant to produce it only for hospitals.
Instead, the plans have been put on the internet. Anybody may build the thing, and
  {k:300-5000*100} people in {g:12-60} countries have already done so.
Not all went well. In {month1} a user burned a hand, and the instructions had to be rewritten and
  translated.
On {day1} the invention was given a national prize worth ${h:5-30*5},000. The money will pay for a
  workshop in which children can break things and put them together again.
# lecture
In this week's lecture we looked at [how languages change|why money has value|how memory
  works|what makes people cooperate], a question that seems simple until one tries to answer it.
Professor {surname1} began with a {thing1}, which was passed from row to row, and asked
  {n:40-200*10} students what it was worth, what it was called and who owned it. || Professor
  {surname1} began with a story from {country1}, where a {job1} had once been asked the same thing
  by a child.
There were nearly as many answers as students, and this was the first point: much that we take to
  be natural rests on agreement.
The second point concerned time. Such agreements are not made on a given day; they grow slowly
  through thousands of small acts that nobody plans.
As an example the professor used {topic1}, whose history shows how a habit of a few becomes a rule
  for all within {m:2-5} generations.
An experiment from {y:1958-2009} supports this. Groups of {k:6-24} strangers had to name pictures,
  and within {h:20-60*10} rounds each group had its own fixed words.
When a few stubborn people were added who always used another word, a quarter of the group was
  enough to turn the rest.
The third point was a warning. Rules that arise without a plan are not always good ones; some
  survive only because everybody thinks that all the others want them.
In the discussion, {name1} objected that laws are made by people with power. The professor agreed,
  but added that even a law needs people who follow it when no one is looking.
For next {day1}, we are to read chapter {c:3-12} and to collect three customs in our own family
  which nobody can explain.
# animals
The {animal1} population near {town1} has [doubled|fallen by half|grown by {p:20-80}%] within
  {n:4-15} years, according to a count by {k:60-400*20} volunteers.
They went out on {day1} and {day2} before sunrise, walked along fixed routes and noted each
  animal, track or call.
In all, {m:310-2900*10} were recorded. Counting them is not easy, as they are shy and move about
  mostly at dusk.
{name1} {surname1}, a biologist who has organised the count since {y:1989-2012}, sees [the milder
  winters|a new hedge law|less poison on the fields|the old quarry, now a reserve] as the main
  cause.
Farmers are less happy about it. {name2} {surname2} reports damage of ${c:2-19},000 to fields and
  fences in a single season and demands to be paid for it.
Other species are affected, too: where there are more of one animal, there are often fewer of
  another, in this case of the {animal2}.
Some people call for hunting to be allowed in {month1}. Animal protection groups reject this and
  suggest dogs, lamps and better fences instead.
The authorities want to wait. They have fitted {s:8-30} animals with small transmitters to learn
  how far they travel; one of them walked {d:90-400*10} kilometres in a month, as far as {town2}.
School classes have named it {name3} and follow its way on a map. || The results will be made
  public in {month2}, together with a plan for the next {g:3-6} years.
Anyone who finds a hurt animal is asked not to touch it but to call the ranger station.
# letter
Dear {name1}, thank you for your letter and for the {things1}, which arrived in one piece, unlike
  the {thing1} last year. || Dear {name1}, I know that I promised to write in {month1}. Forgive
  me; a lot has happened since.
The greatest news is that we have moved. The flat in {town1} had become too dear, and so we now
  live above a {place1}, with a {animal1} for a neighbour.
{name2} has found work as a {job1} and leaves the house at {h:4-7}. I see more of the cat than of
  my own family.
As for me, I have given up {hobby1} because of my knee and have taken up {hobby2}, for which I
  have no talent at all. You would laugh.
The children are well. The older one wants to be a {job2}, and the younger one has not spoken to
  us since {day1}, because we did not allow a pet {animal2}.
In {month2} my mother fell and was in hospital for {n:2-6} weeks. She is home again and complains
  about everything, which the doctor thinks is a good sign.
Do you remember {surname1}, who sat behind us at school? We met by pure chance in {country1}, in a
  queue for {dish1}. We talked for {k:2-5} hours and nearly missed our flights.
{surname1} told me what really happened to the money from the school trip. I shall not write it
  here, but you were right.
We have a room for guests with a bed that is almost long enough. Come for a week in {month3}; the
  train takes {m:3-9} hours and costs about ${p:30-120*10}.
Write soon, and do not send any more {things2}. Yours, as ever, {name3}.
# incident
A fire broke out in a {place1} in {town1} on {day1} shortly after {h:2-11} [a.m.|p.m.] and caused
  damage of about ${c:40-900*10},000. || A power cut brought {town1} to a halt on {day1}: lifts
  stopped, tills failed and the traffic lights went dark for {h:2-9} hours.
{n:30-120} firefighters from four towns were called out. They had the situation under control by
  the early afternoon.
{k:8-60} people had to leave the building next door. A {job1} who had breathed in smoke was taken
  to hospital but could go home the same day.
The alarm was raised by {name1} {surname1}, who was out walking with a dog and noticed [a strange
  smell|a flickering light|water under the gate].
"[The dog would not go on, and that was our luck|I rang every bell in the street|At first I took
  it for a barbecue]," {surname1} said.
According to the police, the cause was probably [a faulty cable|a forgotten iron|a {animal1} that
  had bitten through a wire|a charger left on a sofa]. There are no signs of a crime.
This is the second case of the kind within a year, and the fire chief, {name2} {surname2}, once
  more advised people to have old wiring checked.
The building had been inspected in {month1}; two faults were found then, and according to the
  owner both were repaired. The inspectors have no record of this.
Neighbours have begun to collect clothes and furniture. In {d:2-4} days they received so much that
  they had to rent a garage.
The road to {town2} was open again in the evening. The investigation is likely to take {w:2-8}
  weeks.
# history
The {place1} of {town1} was begun in {y:1410-1690} and finished only {n:60-140} years later, by
  which time nobody remembered what it was for. || For more than {n:200-500*20} years {town1}
  lived on one thing alone: {things1}.
Merchants from {country1} had settled there because of the deep harbour and the low taxes. They
  brought capital, new tools and a taste for {dish1}.
At its height the town had {k:12-40},000 people, two theatres and a law that forbade anyone to
  whistle after dark.
Its wealth drew enemies. In {z:1700-1790} an army lay before the walls for {m:4-11} months, until
  an outbreak of fever forced it to leave.
Legend gives the credit to a {job1} named {name1}, who is said to have fooled the enemy by
  throwing the last loaves of bread over the wall. No document supports the tale.
Decline came quietly. The harbour filled with sand, the new railway passed by at a distance of
  {d:9-30} kilometres, and the young went away.
By 1900 fewer than {p:2-6},000 were left, and stones from the town hall were used to build
  stables.
What saved it was its poverty: nobody had money to pull anything down. In the 1960s an art
  teacher, {name2} {surname1}, bought a house for the price of a bicycle and wrote to all her
  friends.
Today {v:90-600*10},000 visitors come each year. Rents have risen so much that the grandchildren
  of the last weavers live in {town2} and commute.
Historians are now studying {h:300-2000*100} letters which were found behind a wall in {month1},
  and which may show who really ended the siege.
# hike
Trail {n:3-48} from {town1} to {town2} is [{k:9-24} kilometres long|an easy walk for a full
  day|one of the finest in the region] and can be followed in either direction.
It starts behind the {place1}, where there is parking for {c:12-60} cars; on {day1}s, the space is
  usually full by nine.
The first hour leads uphill through beech woods. The climb of {m:240-800*20} metres is steady,
  with benches at every turn. || The first part follows an old railway line with {t:2-5} short
  tunnels, so it is wise to take a lamp.
After the chapel, keep to the left. The sign has been missing since {month1}, and many hikers end
  up at the farm of the {surname1} family, who sell them {dish1} and show them the way back.
From the ridge you can see as far as the coast in clear weather. It is also the place to watch for
  the {animal1}, which nests in the rocks.
Then comes the only hard stretch: {h:200-700*50} metres along a narrow ledge with a steel rope.
  People who are afraid of heights can go around it, which takes {b:30-60*10} minutes more.
There is no water between the spring and the hut, so carry at least {w:2-3} litres for each person
  in summer.
The hut is open from {month2} and has {s:16-40} beds at ${p:14-38}. {name1}, who runs it, plays
  the accordion on request and sometimes without it.
The way down is gentle and ends at the river, where the brave can swim. A bus goes back to the
  start every {q:30-60*30} minutes until seven.
Dogs are welcome but must be kept on a lead. The path is closed after heavy rain, as rocks may
  fall.
# robots
Can a machine be [creative|kind|lazy|funny]? The question was asked at a conference in {town1}
  last {day1}, and the answers could hardly have been more different.
{name1} {surname1}, who builds robots for hospitals in {country1}, said no. "[It does not want
  anything|It copies what it has seen|It never gets bored, and without boredom there are no
  ideas]," the engineer explained.
{name2} {surname2}, a {job1} and author of {n:3-9} novels, disagreed. Most people, too, copy for
  nine tenths of their lives, and nobody calls them machines.
To test this, the organisers had made an exhibition of {k:20-60*2} short texts, half by people and
  half by a computer. The {m:150-600*10} visitors were asked to say which were which.
They were right in {p:51-62}% of cases, hardly better than with a coin. Those who felt most
  certain did worst.
A text about {topic1} was thought by nearly everyone to be the work of a machine. It had been
  written by a {age:9-14}-year-old for school.
Later the debate turned to work. A union speaker feared for {j:20-90} thousand jobs in the region,
  while a company boss said that she could not find enough staff with or without robots.
There was more agreement on rules: those who use such texts should say so, and someone must be
  answerable for mistakes.
A student asked whether the machine had been asked for its opinion. It had. It replied that it had
  none, but could write one of any length by {day2}.
The talks can be watched online from {month1}.
""")


def read_banks(entries: list[str]) -> list[list[list[str]]]:
    """Split the bank text into topics, positions and alternative sentences."""
    banks: list[list[list[str]]] = []
    for entry in entries:
        if entry.startswith("# "):
            banks.append([])
        else:
            banks[-1].append([alt.strip() for alt in entry.split("||")])
    return banks


BANKS = read_banks(BANK_TEXT)


def passage_from(bank: list[list[str]], rng: random.Random) -> str:
    """Compose one passage from a bank, leaving out a few of its middle sentences."""
    last = len(bank) - 1
    dropped = set(rng.sample(range(2, last), rng.choice([0, 0, 1, 1, 2, 3])))
    parts = [rng.choice(alts) for place, alts in enumerate(bank) if place not in dropped]
    breaks = set(rng.sample(range(1, len(parts)), 2)) if rng.random() < 0.35 else set()
    joined = "".join(
        ("" if i == 0 else "<nl><nl>" if i in breaks else " ") + part
        for i, part in enumerate(parts)
    )
    return fill(joined, rng)


def summary_prompt(bank: list[list[str]], rng: random.Random) -> str:
    """Put one passage, or now and then two, into a request."""
    passage = passage_from(bank, rng)
    if rng.random() < 0.12:
        other = passage_from(rng.choice([b for b in BANKS if b is not bank]), rng)
        ask = rng.choice(PAIR_ASKS)
        return ask.replace("<nl>", "\n").replace("@", passage).replace("#", other)
    return fill(rng.choice(ASKS), rng).replace("@", passage)


PAIR_ASKS = block("""
Summarize each of the two texts in one or two sentences.<nl><nl>Text 1: @<nl><nl>Text 2: #
Here are two articles. Give a short summary of each.<nl><nl>(1) @<nl><nl>(2) #
@<nl><nl>***<nl><nl>#<nl><nl>TL;DR of both texts:
""")


HAND_PASSAGES = block("""
The lighthouse at Farrow Point will shine for the last time on Sunday night. For 148 years its
  beam has guided fishing boats past the reef, but satellite navigation has made it unnecessary,
  and the coast authority no longer wishes to pay for repairs. The last keeper, Edith Moss, left
  in 1994, when the lamp became automatic. She plans to be there on Sunday, aged 91, to press the
  switch herself. A group of residents has offered to buy the tower for one pound and turn it into
  a small museum and a bedroom for hikers. The authority likes the idea but insists that the group
  first prove that it can raise 80,000 pounds for a new roof. So far, bake sales and a concert
  have brought in a quarter of this sum. If the money is not found by next summer, the tower will
  be sealed, though not pulled down, since rare gulls nest on its gallery.
Salt was once so precious that soldiers and servants were partly paid in it. Before refrigerators
  existed, it was the chief means of keeping meat and fish from going bad, because it draws water
  out of food and out of the bacteria that spoil it. Towns with salt springs grew rich, and rulers
  soon learned to tax the mineral. In France the hated salt tax helped to bring about the
  Revolution; in India, in 1930, Gandhi walked nearly 400 kilometres to the sea to make salt in
  defiance of British law. Today most salt is not eaten at all. It is used by the chemical
  industry, or is scattered on icy roads. Doctors now worry that people get too much of it, mainly
  from bread, cheese and ready meals, since high intake raises blood pressure. What was once a
  treasure has thus become a cheap powder that many try to avoid.
Our train stopped in the middle of a field at ten past six. For a while nobody spoke. Then the
  guard announced that a cow was standing on the line and that she showed no sign of leaving.
  People laughed, opened windows, and offered advice. A man in a suit, who said he had grown up on
  a farm, climbed down and walked along the track with an apple in his hand. We all watched. The
  cow looked at the apple, then at the man, and lay down. It took forty minutes, two farmers and a
  bucket of oats to move her. By then strangers had shared their sandwiches, a girl had played the
  flute, and the man in the suit had missed the meeting for which he had come. He did not seem to
  mind. When we arrived at last, hardly anyone hurried off, and several of us exchanged addresses.
The board discussed three offers for the new kitchen of the community hall. Bell and Sons asked
  for 18,400 euros and could start in March. Kitchen Direct was cheaper, at 15,900, but wanted
  half of the money in advance and gave a guarantee of just one year. The third firm, Hartmann,
  offered used equipment in good condition for 9,700. Ms. Osei argued that used ovens would cost
  more in the long run. Mr. Bright disagreed: his restaurant had bought from Hartmann twice
  without trouble. After an hour, the board decided by four votes to two to invite Hartmann to
  show the equipment on the 14th. If at least two members are unhappy with it, the order will go
  to Bell and Sons. It was also agreed that the hall will be closed for two weeks in any case, and
  that the yoga class and the chess club must be told by the end of this month.
Octopuses are among the cleverest animals without a backbone. They can open jars, find their way
  through mazes and recognize individual people, squirting water at those they dislike. Two thirds
  of their nerve cells lie in the arms, so that each arm can taste, touch and even make simple
  decisions without asking the brain. Three hearts pump blue blood through the body; its colour
  comes from copper. To escape enemies, an octopus can change its colour and texture within a
  second, hide in a crack no bigger than its beak, or release a cloud of ink. With all these
  gifts, it lives for only a short time. Most species die within one to three years. The females
  stop eating once they have laid their eggs, guard them for weeks or months, and die when the
  young hatch. Since no parent is left to teach them, each young octopus has to learn everything
  anew.
The city of Marlin has cut the number of road deaths from 31 to 4 in just eight years, and other
  cities now send experts to learn how. The answer is surprisingly dull. No single clever device
  was used. Instead, engineers looked at each accident and asked what could be altered at that
  spot. They narrowed lanes, so that drivers slowed down without noticing it, raised crossings to
  the height of the pavement, and took away parking spaces that blocked the view at corners. The
  general speed limit fell to 30 kilometres an hour. At first there was anger: a petition against
  the limit gathered 12,000 names, and the mayor nearly lost her post. But journeys became only
  about a minute longer on average, and the protests faded. The programme cost 22 million, much
  less, according to the city's own figures, than the accidents would have cost in hospital bills
  and lost work.
I learned to swim at the age of fifty-three. As a child I had fallen from a boat, and since then
  water deeper than my knees had made me shake. For decades I found excuses: at the beach I
  guarded the bags, at the pool I had a cold. Then my granddaughter asked why I never came in, and
  I heard myself promise that I would. The lessons took place on Thursday nights with five other
  adults, each with a similar story. For three weeks we did nothing but put our faces in the water
  and blow bubbles. In the fifth week I floated. I lay on my back, looked at the ugly ceiling
  lights, and cried, which nobody can see in a pool. In summer I swam to the raft in the lake,
  twenty metres out. My granddaughter was waiting there. She said, "You are quite slow," and it
  was the finest compliment of my life.
Glass is made mainly of sand, which melts at about 1,700 degrees. Since so high a temperature is
  costly, makers add soda to lower it and lime to make the result durable. The mixture is melted
  in furnaces that burn day and night for up to fifteen years. For windows, the liquid is poured
  on a bath of molten tin, where it spreads out and becomes perfectly flat; the method was
  developed in England in the 1950s and replaced the slow grinding of rough plates. Bottles are
  blown by machines that make several hundred a minute. Small amounts of metal give colour: iron
  makes glass green, cobalt makes it blue, and gold, oddly, makes it red. Glass can be melted
  again and again without losing quality, and every tenth part of old glass in the furnace saves
  about three percent of the energy. Even so, large amounts end up in landfills, mostly because
  colours are mixed or bottles are broken with other waste.
The hospital in Wexley has told its patients that an error in a computer program led to wrong
  appointments for nearly 2,300 people. The fault appeared after an update on 3 May. Patients with
  names of more than twenty letters, or with hyphens, were assigned to the wrong clinics; some
  came to have an eye test and found themselves waiting for a heart surgeon. A nurse noticed the
  pattern after nine days. According to the hospital nobody was harmed, although 61 operations had
  to be put off. The company that makes the program has apologized and will pay for extra evening
  clinics throughout June. Patient groups say that the apology came late. They want to know why
  the update was not tried out on a small scale first. The hospital's director agreed that this
  had been a mistake and said that from now on, each change will be tested in one department for
  two weeks.
Dear neighbours, many of you have asked what is happening with the old cinema, so here is the
  news. The owner has agreed to let us use the building for free until next March. In return, we
  must fix the heating and pay for insurance, which comes to about 3,100 dollars. We have 1,850 so
  far. The projector works, the seats are dusty but sound, and a colony of bats in the attic must
  not be disturbed before September, because the law protects them. Our plan is to show one film
  every second Friday, beginning in October, and to open the foyer as a cafe on Saturdays. For
  this we need people who can paint, sew curtains, sell tickets or bake. If you would like to
  help, come to the side entrance this Saturday at ten, and wear old clothes. If you cannot, a
  small gift would be welcome, too. Yours, Ruth and Leo.
Concrete is the most used material on Earth after water. It consists of sand, gravel, water and
  cement, the grey powder that binds everything together. Cement is made by heating limestone to
  more than 1,400 degrees, and this step alone causes around eight percent of all carbon dioxide
  set free by people. Part of it comes from the fuel, but the larger part escapes from the stone
  itself, so that cleaner energy alone cannot solve the problem. Engineers are therefore trying
  other ways. Some replace a share of the cement with ash or ground slag; others press captured
  carbon dioxide into the wet mixture, where it turns into stone again. The Romans, too, may offer
  a lesson: their harbour walls, made with volcanic ash, have grown stronger in sea water for two
  thousand years. The simplest idea, however, is to pull down fewer buildings, since the greenest
  concrete is the one that need not be poured.
The parrot had lived at the hotel longer than any of the staff. It sat in a brass cage next to
  reception and knew the names of all the regular guests, as well as several things about them
  that it should not have known. When the new manager arrived, she decided that it had to go, for
  it had called an important visitor a cheapskate. An advertisement was put in the paper. But
  nobody came except an old man, who had spent his honeymoon in the hotel forty years before. He
  bent down to the cage, and the bird tilted its head and said, in the voice of a young woman,
  "Look, Henry, you can see the sea from here." The old man stood quite still. His wife had died
  in the spring. The manager, who had seen it all from her desk, tore up the papers. The parrot
  stayed, and Henry came for tea with it every Wednesday.
A survey of 1,500 office workers has shown that most dislike open-plan offices, but not for the
  reason usually given. Noise came only third on the list of complaints. What bothered people more
  was the feeling of being watched, mentioned by 58 percent, and the lack of any place of their
  own, mentioned by 51. In firms where desks are shared and must be cleared each evening,
  employees took a third more days of sick leave. Bosses saw things differently: three quarters of
  them believed that the open rooms helped teams to work together. Measurements suggest otherwise.
  In two companies that had removed their walls, talk between workers fell by more than half, as
  people put on headphones and wrote messages instead. The authors of the survey do not call for a
  return to closed rooms. They advise firms to offer a mixture of quiet and lively places, and to
  let people choose.
Potatoes were first grown in the Andes, about eight thousand years ago. Farmers there knew
  hundreds of kinds and had a way of freezing and drying them so that they kept for years. Spanish
  sailors took the plant to Europe in the sixteenth century, but it was met with suspicion. It was
  not mentioned in the Bible, its leaves were poisonous, and some believed that it caused disease.
  Kings used tricks to make it popular. It is said that in France a field of potatoes was guarded
  by soldiers, so that curious peasants would think it valuable and steal the plants at night. In
  time, the crop fed millions and helped cities to grow. Yet reliance on it was dangerous. When a
  mould destroyed the harvests in Ireland from 1845 on, a million people died and as many left the
  country. Nearly all Irish fields had been planted with one and the same variety.
The annual report of the Green Valley Animal Shelter shows a difficult but hopeful year. The
  shelter took in 1,146 animals, 12 percent more than the year before, among them 640 cats, 402
  dogs and a surprising 39 tortoises. Many were pets that had been bought during the long lockdown
  and then given up. New homes were found for 934 animals; the average stay fell from 41 to 33
  days, thanks to better photographs on the website and a scheme that lets families try out a dog
  for a weekend. Costs rose to 412,000 dollars, mainly because of vet bills and heating. Gifts
  covered 370,000, and the rest came from savings, which will last for three more years at this
  rate. The shelter therefore plans to charge a small fee for animals brought in by their owners.
  It also seeks volunteers for early mornings, when the need is greatest.
On the night of 12 August the sky above the village of Sorrel turned green. People ran into the
  streets; some filmed, and others prayed. The fire brigade took 140 calls within an hour. No
  aurora had ever been seen so far south, and the first explanations were wild: a secret weapon, a
  burning factory, the end of the world. The truth came out two days later and was humbler. A
  grower of tomatoes had installed new lamps in his greenhouses, which covered six hectares, and
  had tested all of them at once, on a night of low, thin cloud. The light was caught by the
  droplets and spread for miles. The grower apologized, bought blinds, and invited the village to
  a dinner of tomato soup under the green glow. Nearly everyone came. Since then it has been held
  each year, and tourists ask when it is, months ahead.
Sleep is not a state of rest for the brain. In the course of a night, we pass four to six times
  through a cycle of about ninety minutes. It begins with light sleep, sinks into deep sleep, in
  which the body repairs tissue and the brain clears away waste, and ends with a phase of rapid
  eye movements in which most dreams take place. Deep sleep is longest early in the night, and
  dream sleep towards morning. Both seem to help memory: the first for facts, the second for
  skills and feelings. People who sleep less than six hours over a long time are more likely to
  fall ill, to gain weight and to have accidents, although they often believe that they have
  adapted. The amount needed differs. Newborns sleep up to seventeen hours, most adults need seven
  to nine, and teenagers have an inner clock that runs late, which makes early school hours hard
  for them.
The trial of the so-called cheese gang ended yesterday with sentences of two to four years. Five
  men had stolen 26 tonnes of hard cheese from storehouses in the region over eighteen months,
  worth nearly 300,000 euros. They worked at weekends, used rented vans with false signs, and sold
  the wheels to restaurants abroad. They were found out because of their own care. To remove the
  numbers burned into the rind, they had bought a grinding machine and returned it, complaining
  that it was clogged with cheese. The shop assistant called the police. In court, four of the men
  confessed. The fifth, a former cheese maker, said that he had only wanted to show how badly the
  stores were guarded. The judge did not believe him. The makers' union has now agreed to put
  small chips into the rind, which should make it possible to trace each wheel.
My grandfather repaired clocks, and our house ticked. There were forty or more of them, on
  shelves, on stairs, even in the bath, and no two agreed. Visitors found it hard to sleep. To us,
  silence was strange. He used to say that a clock is like a person: if it stops, do not shake it,
  but find out what it is afraid of. Mostly it was dust. After his death, no one wound the clocks,
  and within a week they fell silent, one by one; the last was a small travelling alarm under the
  sofa. My mother could not bear it. She got up at night, found the box of keys and wound them
  all. It took until dawn. She has done so every Sunday for eleven years now. She has never
  learned how to repair them, and when one stops for good, she stands it with the others and turns
  its face to the window.
Deserts are defined by a lack of rain, not by heat. The largest of all is Antarctica, where less
  than 200 millimetres of snow falls in a year on average. Hot deserts such as the Sahara lie
  mostly in two belts north and south of the equator, where dry air sinks towards the ground.
  Others exist because mountains hold back the clouds, or because cold ocean currents let no moist
  air rise, as on the coast of Chile, where some weather stations have gone years without
  measuring a drop. Only about a fifth of the world's deserts are covered by sand; most consist of
  stone and gravel. Life has found many ways to cope. Some plants sleep as seeds for decades,
  beetles drink fog that settles on their backs, and many animals come out only at night. People,
  too, have adapted, with loose clothes, thick walls, and knowledge of hidden wells handed down
  for centuries.
From Monday, customers of the Northern Line must be ready for changes. Between Abbey Street and
  Castle Park no trains will run for sixteen days, because 3.4 kilometres of track from 1962 are
  to be replaced. Buses will leave every five minutes from the main exit of both stations, but the
  journey will take about twenty minutes longer, and bicycles cannot be taken along. Tickets stay
  valid. Those who hold a monthly pass can ask for a refund of 15 percent up to the end of the
  month; the form is on the website and at all counters. On the two Saturdays, the stations will
  be closed completely so that cranes can work safely. The line expects the work to end on the
  22nd, in time for the spring fair. After that, trains will be able to run at 80 instead of 50
  kilometres an hour, which will save commuters about four minutes a day.
A robot that sorts rubbish has been tested in Holmby for half a year. Its camera looks at a moving
  belt and its three arms pick out bottles, cans and cardboard, up to 70 pieces a minute. A
  skilled worker manages about 40. But the machine makes mistakes that no human would: it took a
  wet newspaper for a plastic bag and, on one occasion, tried for an hour to pick up the shadow of
  a lamp. The operators had to change the lighting and train the software with 200,000 new
  pictures. Now nearly 95 percent of the choices are right. The twelve people who used to stand at
  the belt have not lost their jobs. Five look after the machine and the others check what it
  leaves behind. "The smell is the same, but my back no longer hurts," one of them said. The town
  will decide in autumn whether to buy two more.
The emperor had a garden in which nothing was allowed to be ugly, so the gardeners pulled up every
  weed and hid every worm. Year by year the flowers became paler, and no one knew why. Wise men
  were called. One blamed the wind, another the stars. At last a child who had come to deliver
  eggs was asked for fun. "There are no bees here," she said, "because there are no weeds in
  spring; and the soil is hard because there are no worms." The wise men laughed. The emperor did
  not. He ordered that one corner be left alone for a year, and he went there each morning to be
  annoyed by it. Nettles came, then butterflies, then thrushes. In the third year the roses next
  to the wild corner were the reddest in the land. The emperor made the child his chief gardener,
  and when she asked for wages, she was given the key to the gate.
Bicycles became popular in the 1890s, after chains and air-filled tyres had made them safe and
  comfortable. The change they brought is easily forgotten. A bicycle cost a few months' wages,
  far less than a horse, and needed no food. Workers could live further from the factory, and
  villagers could court people in the next valley. For women the machine meant freedom; long
  skirts and corsets were hard to ride in, and the need for other clothes gave a push to dress
  reform. Doctors warned against "bicycle face", a tense look supposedly caused by keeping one's
  balance. Cyclists also formed clubs which demanded better roads, long before drivers did, and
  bicycle makers developed ball bearings, light steel tubes and mass production. Several of them
  later turned to cars or, like the Wright brothers, to aeroplanes. In this way, the humble
  bicycle helped to build the machines that for a time almost drove it off the streets.
Dr. Lim's talk on Wednesday dealt with the question why some people hardly ever forget a face. In
  her tests, volunteers saw photographs of children and had to find the same persons as adults
  among strangers. Most guessed. Roughly one in fifty did extremely well, and some police forces
  now look for such "super-recognizers" to watch films from security cameras. The skill has little
  to do with intelligence or with general memory; many of the best could not remember where they
  had put their keys. It seems to be partly inherited, since identical twins have similar scores.
  Training helps only a little. At the other end of the scale, about as many people cannot
  recognize even their own family by face and rely on voice, hair or way of walking. Most of them
  do not know that they are different. Dr. Lim ended with a plea for large name badges at
  conferences.
The football club of Little Harding has not won a match for three years, and its members are proud
  of it. They have lost 88 games and drawn two, the last of them because of fog. It began as bad
  luck. Then a radio reporter made fun of the team, and to everybody's surprise the crowds grew.
  People came by bus to see them lose. The club sold scarves with the words "Maybe next week", and
  with the money it paid for a new roof, floodlights and a team for girls, which, awkwardly, wins
  all the time. Coach Dan Pell insists that his men try their best. Last Saturday they were
  leading 2-1 until the final minute, when the goalkeeper was stung by a wasp. The whole ground
  stood and sang. "If we ever win," said Pell, "I do not know what will become of us." The next
  match is on Saturday at three.
Tea is made from the leaves of a single plant, an evergreen shrub from the borders of China and
  India. Whether it becomes green, black or oolong depends on what happens after the picking. For
  green tea, the leaves are heated at once, so that they keep their colour. For black tea they are
  rolled and left in the air, where enzymes turn them dark and give them a stronger taste; oolong
  lies in between. White tea consists of young buds that are merely dried. Good tea is still
  picked by hand, since machines cannot tell the youngest two leaves and the bud from the rest. A
  skilled picker gathers about 30 kilograms a day, enough for seven kilograms of finished tea.
  Drinks made from mint or camomile are, strictly speaking, not teas. After water, tea is the most
  widely drunk liquid in the world, ahead of coffee, beer and all sweet drinks.
Customer feedback for the app was collected over four weeks; 812 people replied. The average
  rating is 3.6 out of five, down from 3.9 in the autumn. Users praise the clear design and the
  fast search. The chief complaint, named by 44 percent, concerns the new login, which asks for a
  code by text message every single time. Older users in particular give up at this step. In
  second place comes battery use, at 21 percent: the map keeps running in the background, a known
  bug that was to be fixed in version 5.2 but was delayed. Some 9 percent miss a dark mode. We
  suggest three steps. First, the code should be asked for only once on each device. Second, the
  map bug should be repaired before any new function is built. Third, those who gave one star
  should be written to personally, because half of them left their address and offered to explain.
When the bakery closed, the street lost its smell. For sixty years the first scent of the day on
  Tanner Lane had been warm bread, and people had set their lives by it without knowing. After the
  baker retired, children were late for school, dogs refused to go for walks, and the postman took
  a wrong turn twice. In winter a young woman rented the shop. She was no baker; she mended shoes.
  Leather, glue and polish now filled the lane, and there were complaints. She listened to them
  all, and one night she borrowed the baker's book. The first loaves were like stones. She gave
  them away as doorstops. By spring they could be eaten, and by summer there was a queue. These
  days she mends shoes in the afternoon and bakes before dawn, and the old baker sits by the oven,
  tells her what she does wrong, and has never looked so well.
Coral reefs cover less than one percent of the sea floor but are home to about a quarter of all
  kinds of sea creatures. They are built by tiny animals, which live in colonies and form
  skeletons of lime. Most of their food comes from algae that live inside their bodies and give
  them their colours. If the water becomes too warm, even by one or two degrees for some weeks,
  the corals throw out the algae and turn white. This is called bleaching. They can recover if the
  water cools in time; otherwise they starve. Pollution, anchors and fishing with dynamite do
  further harm. In several countries, researchers raise pieces of coral in underwater nurseries
  and fix them to damaged reefs, choosing those that have survived hot summers. Such work helps in
  some places, but it is slow and costly, and scientists stress that it cannot replace the effort
  to limit the warming of the oceans.
The expedition left base camp at two in the morning, in clear and very cold weather. There were
  five of us on two ropes. By sunrise we had reached the col, an hour ahead of plan, and Marta was
  singing. Then the wind rose. At 5,900 metres Jon lost a glove; it sailed over the ridge like a
  bird. He said that his hand was fine, but it was already grey. We had 300 metres to go, and none
  of us wished to say it. In the end it was Jon himself who did. "The mountain will be here next
  year," he said, "and I should like my fingers to be here as well." So we turned round. Going
  down took nine hours, because the snow had become soft. The doctor thinks that he will keep all
  his fingers. Two days later, another group reached the top in sunshine and waved to us. We have
  asked for permission for next June.
The parliament has passed a law that gives people the right to have their devices repaired. From
  next January, makers of phones, washing machines and vacuum cleaners must supply spare parts for
  at least seven years and may not use software to block repairs by independent workshops. Prices
  for the parts must be "reasonable", a word over which there was much argument; consumer groups
  had called for a fixed upper limit. Makers had warned of risks to safety and of higher costs. In
  return for giving up their resistance, they were granted an extra year for small household
  goods. The government expects the law to save each household about 170 euros a year and to
  reduce electronic waste by a tenth. Owners of repair shops are pleased but short of staff: in
  the whole country, only 340 young people began to train for the trade last year, half as many as
  ten years ago.
Leonard Voss, who drew the same tree for fifty years, has died at the age of 84. The oak stood on
  a hill behind his house, and he drew it nearly every day, in ink, chalk or charcoal, more than
  17,000 times. He had worked as a tax inspector and never took lessons. For decades nobody knew
  about the drawings, which he kept in shoeboxes sorted by weather. They came to light when a
  plumber asked what was in the cellar. An exhibition in 2009 drew large crowds; people said that,
  walking past the walls, they could watch time itself. Voss went to the opening, looked around
  and left early, as the light on the hill was good. He refused to sell a single sheet and has
  left them all to the town. In March, a storm brought down the oak. He made eleven drawings of
  the stump, and friends say that they are his best.
""")

HAND_SUMMARY = [
    re.sub(r"\[([^|]*)\|[^\]]*\]", r"\1", ASKS[i % len(ASKS)]).replace("@", passage)
    for i, passage in enumerate(HAND_PASSAGES)
]


CHAT = block("""
Write a [short blog post|diary entry|travel report|product review] about [a trip to {country}|a
  week of {hobby}|a {place}|{topic}]. => [Rewrite it in a {tone} tone.|Make it half as long.|Now
  write it for {audience}.|Add a surprising ending.|Turn it into a list of bullet points.]
Write a {tone} email to {name}, asking for [help with {topic}|a day off on {day}|a new
  {thing}|feedback on a talk about {topic}]. => [Make it shorter and more direct.|Now write
  {name}'s reply.|Give me three subject lines for it.|Change the tone so that it is more {tone}.]
Write a [poem|song] about {feeling} and a {animal}. => [Now rewrite it without using the letter z
  and with fewer lines.|Which line is your favourite, and why?|Turn it into a short story.|Add
  another verse about {month}.]
Tell me a story about a {job} in a {place}. => [Continue the story.|Retell it from the view of a
  {animal}.|What is the moral of the story?|Sum it up in one sentence.|Give it a sad ending
  instead.]
Describe a {place} for [a travel guide|a novel|a film script]. => [Now describe the same place a
  hundred years later.|Take out all adjectives.|Rewrite it as if a {job} were speaking.|Add some
  sounds and smells.]
Pretend that you are a {job} from {town}. How was your day? => [What do you like least about your
  work?|Stay in your role: would you recommend the job to {name}?|Now answer as a very tired
  {job}.|What would you tell a beginner?]
Act as a {animal} that can talk. [Tell me about your life.|What do you think of humans?|Give me
  some advice.] => [And what are you afraid of?|Tell me that again in one sentence.|What would you
  say to a {animal}?|Now end our talk with a joke.]
You are {person}, talking to a young reporter. What was your greatest success? => [And what was
  your greatest mistake?|What would surprise you most about the world today?|Give one piece of
  advice to young people.|Answer again, but more modestly.]
Play the role of a {tone} shop assistant who wants to sell me a {thing}. => [I think it is too
  expensive. What do you say?|Why should I not buy it at another shop?|I will take it. Finish the
  sale.]
{name1} is taller than {name2}, and {name2} is taller than {name3}. Who is the [shortest|tallest]?
  => [If {name4} is taller than {name1}, who is the tallest now?|Explain how you found the
  answer.|What if {name3} grows and passes {name2}? Give the possible orders.]
{name1} has {n:2-5} brothers and {m:1-4} sisters. How many [sisters|brothers] does {name1}'s
  sister have? => [Explain your reasoning.|What changes if {name1} has one more brother?|Make up a
  similar puzzle.]
You pass {k:1-3} runners in a race and are now in place {n:2-6}. In which place were you before?
  => [What if you had passed one more?|Explain it to {audience}.|Now give me a trick question of
  this kind.]
If all {animal1}s are {job}s and some {job}s are tall, does it follow that some {animal1}s are
  tall? => [Why or why not? Give an example.|Change one word so that the conclusion does
  follow.|What is such an argument called?]
Which is heavier, [a box of {things1} or a box of feathers, if both weigh {n:2-9} kilograms|a
  {thing1} or a {thing2}]? => [Are you sure? Explain.|Think of a case in which the answer would be
  different.|What would change on the Moon?]
{name1} has {n:20-90} {things1} and gives {m:3-15} to {name2} and {k:2-5} to {name3}. How many are
  left? => [Now {name1} doubles what is left. How many are there?|Write this as an equation.|What
  fraction of the {things1} was given away?]
A {thing} costs ${p:20-90*5}, and the price goes up by {r:10-50*10}%. What is the new price? =>
  [What is the price if it then falls by {r}%?|Why is it not the old price again?|How much are
  {m:3-8} of them?]
Solve for x: {a:2-9}x + {b:1-20} = {c:21-90}. => [Check your answer.|Now solve {a}x - {b} =
  {c}.|Write a word problem that leads to this equation.]
What is the area of a [rectangle with sides {a:3-15} and {b:3-15}|triangle with base {a:4-16*2}
  and height {b:3-15}|square with side {a:4-20}]? => [What happens to the area if all sides are
  doubled?|What would be the area if one side were {k:2-3} longer?|Explain the formula.]
What is the probability of [rolling a {n:1-6} with a die|drawing a heart from a deck of
  cards|getting {n:2-3} heads in {n} coin flips]? => [And twice in a row?|What is the probability
  that it does not happen?|Explain it to {audience}.]
Write a Python function that [counts the {things} in a list|returns the longest word in a
  text|finds the {n:2-5} largest numbers in a list|checks whether a word has double letters|turns
  a list of names into initials|removes every {n:2-5}th item of a list]. => [Add comments to the
  code.|How could you make it shorter?|Write two tests for it.|What happens if the input is
  empty?|What is its time complexity?]
Explain [loops|recursion|dictionaries|classes|exceptions|list slicing|lambda
  functions|inheritance|global variables|string formatting|unit testing|sorting] in
  [Python|JavaScript|Java] to {audience}. => [Show a short example.|What is a common mistake with
  this?|Sum it up in one sentence.|Give me an exercise to practise it.]
Write [an HTML page|a SQL table|a JSON object|a Python class] for a shop that sells {things1}. =>
  [Add a price to each item.|Explain each part.|How would I look up the cheapest item?|Now do the
  same for {things2}.]
Extract the names, places and times: "{name1} {surname} will meet {name2} at the {place} in {town}
  on {day} at {h:1-11} p.m., and {name3} comes an hour later." => [Put them in a table.|Who
  arrives last?|Give the same facts as JSON.|Rewrite the text with {name1} coming on {day}
  instead.]
Rate each review from 1 to 5: (a) "The {dish1} was cold and the waiter was rude." (b) "Best
  {dish2} in {town}!" (c) "The {dish3} was fine, the music was too loud." => [Explain your
  ratings.|Write a reply to the worst review.|Which words show the feeling in each of them?|Return
  the ratings as a Python list.]
From this list, pick out all animals: {animal1}, {thing1}, {job}, {animal2}, {thing2}, {animal3}.
  => [Now sort them by size.|What are the other words?|Write a sentence with all of them.|Add
  three more animals.]
Here are the sales: {name1} sold {a:10-60} {things1}, {name2} sold {b:10-60} and {name3} sold
  {c:10-60}. Who sold the most? => [What was the total?|Write one sentence for the report.|Show it
  as a table, from high to low.]
[Explain|What is] {topic}, and why does it matter? => [Give an example.|Explain it again, for
  {audience}.|What do people often get wrong about it?|Make your answer three sentences long.|Ask
  me two questions to test what I have learned.]
How does [a {gadget}|the {organ}] work? => [Make that simpler.|What can go wrong with it?|Compare
  it with something from daily life.|Give a one-line summary.]
Why is {element} [useful|important to people]? => [What would we use if there were none of it?|How
  was it discovered?|Say it again in two sentences.]
What would happen if [the Moon vanished|all {animal}s died out|{planet} were twice as large|there
  were no friction|people did not need sleep|the {river} dried up]? => [Which of these effects
  would come first?|Explain the first point in more detail.|Now answer as a funny {job}.]
What led to {happening}? => [Who gained most from it?|Sum that up for {audience}.|How would the
  world be different without it?|Put the main points in a list.]
Compare {person1} and {person2}. => [Which of them had more influence? Explain.|Imagine a short
  talk between the two.|Shorten your answer to two sentences.]
What is the main theme of {work}? => [Give an example from the book.|How would {audience} see
  it?|Compare it with {work2}.|Write a short and {tone} review of it.]
Discuss the effect of {topic1} on [society|art|the economy|schools|families]. => [Now argue the
  other side.|Give a real example of your last point.|Which point is the strongest?|Turn your
  answer into a short speech.]
I want to start {hobby}. What do I need? => [I have only ${n:20-90*10} to spend. What should I buy
  first?|How long until I am good at it?|Make me a plan for the first week.|What mistakes should I
  avoid?]
Suggest a menu with {dish1} for {n:3-9} guests. => [One guest does not eat meat. Change the
  menu.|Write the shopping list.|What can I prepare the day before?|Make the text sound like a
  {tone} invitation.]
Plan a weekend in {country} for {name} and a friend. => [Make it cheaper.|It will rain on both
  days. Change the plan.|Write it as a postcard home.|What should they pack?]
Give me {n:3-6} ideas for a present for a {job} who likes {hobby}. => [Which one costs the
  least?|Write a card to go with the second one.|I need something I can make myself.|Explain your
  first idea.]
""")

HAND_CHAT = block("""
Write a four-sentence story about a lost key. => Now tell it backwards.
Explain how rainbows form. => Why are they curved?
My flatmate never washes up. What can I say? => Make it sound less angry.
Write a speech for the wedding of my sister. => Add a joke about her cooking.
You are a ghost who is scared of people. Introduce yourself. => A family moves into your house.
  What do you do?
What weighs more, a litre of water or a litre of oil? => So which one floats on top?
I have a fox, a goose and a sack of corn, and a boat that carries me and one of them. How do I
  cross the river? => Would it be easier with two geese and no fox?
What is 15% of 240? => Now add 20 to that and halve it.
If a clock strikes six times in five seconds, how long does it take to strike twelve times? => Why
  is the answer not ten?
Write a Python program that prints a calendar for one month. => Now highlight the Sundays.
What does git do? => List the five commands I will use most.
List every colour in this text: The grey cat sat on a red rug beside a blue vase and a green
  chair. => Which thing had which colour? Use a table.
Here is an email: "Hi Jo, the van comes at 8 on Friday, so please bring boxes. Al." Who wrote it,
  and what should Jo bring? => Write Jo's answer.
What is entropy? => Can you say that without any formulas?
Why do stars twinkle? => Do planets twinkle, too?
Who was the better strategist, Hannibal or Scipio? => Support your answer with one battle.
What do people mean by the social contract? => Name a thinker who disagreed.
Help me name my bakery, which sells only bread. => I like the second name. Write a slogan for it.
Write a limerick about a cook from Leeds. => Explain the joke.
Teach me three phrases in Italian for a restaurant. => How would I say them more politely?
Pretend to be a medieval knight using a smartphone for the first time. => Someone calls you.
  Answer the phone.
Act as my job interviewer for a post in a bookshop. Ask me the first question. => I would say that
  I love talking to people about novels. What is your next question?
Write a review of a hotel with very thin walls. => Now write the hotel's reply.
How can I sleep better? => Which of these would help most quickly?
A bat and a ball cost 110 cents, and the bat costs 100 cents more than the ball. What does the
  ball cost? => Show me how to check that.
Monday's child was born three days before yesterday, and today is Saturday. On which day was the
  child born? => And on which day will the child be one week old?
Three switches outside a room control three lamps inside. You may go in once. How do you find out
  which is which? => Would this work with LED lamps?
Can you simplify 18/24? => And what is it as a percentage?
Write a function in Python that converts inches to centimetres. => Make it accept a list of values
  as well.
Explain the difference between == and is in Python. => Show a case where they give different
  results.
Turn this into JSON: Ann, 34, nurse, Leeds; Bo, 29, cook, York. => Add a field called "id" to each
  person.
Find the verbs in this sentence: She opened the letter, read it twice and burned it. => Put the
  sentence into the future.
What are mitochondria? => Give me a memory trick for that.
How do vaccines protect us? => Explain it with a castle and an army.
What was the Renaissance? => Name two artists and say what they did.
What is the difference between ethics and law? => Give an example of something that is legal but
  wrong.
Give me a quick recipe with rice and eggs. => I have no oil. What can I use instead?
Write a toast for New Year's Eve. => Cut it down to one sentence.
Write a children's story about a cloud that is afraid of rain. => What questions could I ask the
  children about it?
Be a pirate and explain how to save money. => Now say the same as a bank clerk.
Imagine you are the last tree in a city. What do you see? => A child visits you. What happens?
Is a tomato a fruit or a vegetable? => So what about a cucumber?
Everyone in my chess club plays everyone else once. There are 7 of us. How many games is that? =>
  What if one of us drops out?
A frog is at the bottom of a 10-metre well. It climbs 3 metres a day and slips 2 each night. When
  is it out? => What if it slips only 1 metre?
What is the sum of all numbers from 1 to 100? => Show the trick behind it.
Write a loop in Python that prints only every third letter of a word. => Can that be done without
  a loop?
Which is better for a beginner, Python or C? => Write "Hello" in both.
Extract the prices: Tea 2.50, cake 3.80, soup 5.00, and service is free. => What do I pay for two
  teas and a soup?
Is this message urgent? "Server room is at 45 degrees, please call." => Write a short reply to the
  sender.
Why does ice float? => What would lakes be like if it did not?
How do planes stay in the air? => Explain it to me like I am six.
Why did the Roman Empire fall? => Which of these causes do historians argue about most?
Summarize the plot of Romeo and Juliet. => Now give it a happy ending.
I feel nervous about my driving test. => What should I do the minute before it begins?
Write a note to a teacher explaining why the homework was eaten by a goat. => Make it sound
  believable.
Describe a sunset without using any colours. => Turn that into a haiku.
Write two lines of small talk for an elevator. => Now for a very long elevator ride.
You are a museum guide who dislikes art. Show me a painting. => I like it, though. How do you
  react?
What is compound interest? => How much would 100 dollars be after two years at 10%?
Give me a word that rhymes with orange, or nearly does. => Use it in a short verse.
What are good manners on a train? => Write them as a funny sign.
""")


def cycle(templates: list[str], rng: random.Random, taken: set[str], want: int) -> list[str]:
    """Fill the templates in turn until enough distinct prompts are found."""
    made: list[str] = []
    misses = 0
    while len(made) < want and misses < 50:
        order = templates[:]
        rng.shuffle(order)
        before = len(made)
        for template in order:
            text = fill(template, rng)
            if text not in taken and len(made) < want:
                taken.add(text)
                made.append(text)
        misses = misses + 1 if len(made) == before else 0
    return made


def expand(hand: list[str]) -> list[str]:
    """Turn hand-written entries into final text."""
    return [h.replace("<nl>", "\n") for h in hand]


def text_category(name: str, templates: list[str], hand: list[str]) -> list[list[str]]:
    """Build the single-turn prompts of a template-driven category."""
    rng = random.Random(f"{SEED}-{name}")
    done = expand(hand)
    made = cycle(templates, rng, set(done), PER_CATEGORY - len(done))
    return [[t] for t in done + made]


def code_category() -> list[list[str]]:
    """Build the code prompts."""
    rng = random.Random(f"{SEED}-code")
    done = expand(HAND_CODE)
    taken = set(done)
    variant = 0
    while len(done) < PER_CATEGORY:
        for spec in rng.sample(SPECS, len(SPECS)):
            text = code_prompt(spec, variant + rng.randrange(2) * 5, rng)
            if text not in taken and len(done) < PER_CATEGORY:
                taken.add(text)
                done.append(text)
        variant += 1
    return [[t] for t in done]


def summary_category() -> list[list[str]]:
    """Build the summarization prompts."""
    rng = random.Random(f"{SEED}-summarization")
    done = [p.replace("<nl>", "\n") for p in HAND_SUMMARY]
    taken = set(done)
    while len(done) < PER_CATEGORY:
        for bank in rng.sample(BANKS, len(BANKS)):
            if len(done) < PER_CATEGORY:
                text = summary_prompt(bank, rng)
                if text not in taken and 100 <= len(text.split()) <= MAX_WORDS:
                    taken.add(text)
                    done.append(text)
    return [[t] for t in done]


def chat_category() -> list[list[str]]:
    """Build the two-turn prompts."""
    rng = random.Random(f"{SEED}-chat")
    pairs = [expand([p])[0] for p in HAND_CHAT]
    pairs += cycle(CHAT, rng, set(pairs), PER_CATEGORY - len(pairs))
    return [[t.strip() for t in p.split("=>")] for p in pairs]


def main() -> None:
    """Write train.jsonl and print statistics."""
    groups = {
        "math": text_category("math", MATH, HAND_MATH),
        "instruction": text_category("instruction", INSTRUCTION, HAND_INSTRUCTION),
        "code": code_category(),
        "qa": text_category("qa", QA, HAND_QA),
        "summarization": summary_category(),
        "chat": chat_category(),
    }
    rows = [(name, turns) for name, group in groups.items() for turns in group]
    random.Random(SEED).shuffle(rows)
    if len({tuple(turns) for _, turns in rows}) != len(rows):
        raise ValueError("duplicate prompts")
    with OUT.open("w", encoding="utf-8") as handle:
        for number, (name, turns) in enumerate(rows, 1):
            row = {"question_id": number, "category": name, "turns": turns}
            handle.write(json.dumps(row, ensure_ascii=False) + "\n")
    for name, group in groups.items():
        sizes = sorted(sum(len(t.split()) for t in turns) for turns in group)
        print(
            f"{name:14s} n={len(group)} words min={sizes[0]} "
            f"median={statistics.median(sizes):g} mean={statistics.mean(sizes):.1f} max={sizes[-1]}"
        )
    print(f"total {len(rows)}, duplicates 0")


if __name__ == "__main__":
    main()
