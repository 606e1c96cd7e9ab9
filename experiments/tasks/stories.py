"""Readable filler text from a small probabilistic grammar of English.

Every story introduces a hero, a friend, an animal, a place and a thing, and then refers to them
again, with matching pronouns. So a small language model has references to resolve. The text depends
only on its seed; there is no corpus.
"""

import random

BOYS = "Tom Ben Sam Max Leo Jack Finn Hugo Oscar Peter Paul Noah Luke Theo Henry David".split()
GIRLS = "Anna Lily Mia Ruth Nora Emma Clara Ivy Rosa Jane Alice Grace Zoe Ella Sophie Laura".split()
ADULTS = (
    "farmer baker teacher sailor doctor grandmother king queen painter hunter miller gardener"
).split()
ANIMALS = (
    "dog cat bird horse fox rabbit goat duck mouse owl frog bear sheep pig wolf turtle hen donkey"
).split()
PLACES = (
    "garden forest river market school lake hill barn kitchen beach village library bridge tower"
    " field harbour station mill cave castle desert valley farm shop square park church"
    " hotel museum"
).split()
THINGS = (
    "lamp key box book map coin ring boat kite ball hat bell letter rope basket clock mirror drum"
    " cup blanket shell stone flute feather candle coat ladder wheel bottle pencil knife"
    " chain sword crown"
).split()
COLOURS = "red blue green yellow white black purple golden".split()
LOOKS = (
    "red blue green yellow white black purple golden new silver wooden broken shiny"
    " strange round heavy pretty long dirty simple"
).split()
SIZES = "small big little tiny young grey brown clever friendly hungry gentle lazy wild".split()
MOODS = (
    "happy sad tired proud afraid angry quiet brave curious cold glad sleepy lonely calm worried"
).split()
FOODS = "bread soup cake apples cheese honey milk tea pie berries rice fish butter jam salt".split()
WEATHER = "sunny rainy windy cloudy snowy stormy warm foggy".split()
TIMES = "morning evening afternoon night".split()
SEASONS = "spring summer autumn winter".split()
NUMBERS = "two three four five six seven eight nine ten twelve".split()
WAYS = "slowly quickly quietly carefully softly bravely gladly calmly proudly happily".split()

# One list for each part of a story, in the order of the story. {H} is the hero and {F} the friend.
# {he} {him} {his} refer to the hero and {she} {her} {hers} to the friend, of either gender.
OPENINGS = (
    "One {weather} {time} {H} went to the {place} with a {look} {thing}.",
    "Once upon a time there was a child named {H} who lived near the {place}.",
    "It was a {weather} {time} in {season}, and {H} sat alone by the {place}.",
    "{H} had a {size} {animal} and a {look} {thing}.",
    "In a {size} house near the {place} lived {H} and the {adult}.",
    "Last {season} {H} walked to the {place} every {time}.",
    "Long ago a {adult} gave {H} a {look} {thing} to keep.",
    "Every {time} {H} and {F} met at the {place} and talked about the sea.",
)
MEETINGS = (
    "There {he} met {F}, who was {mood} that {time}.",
    "{His} friend {F} came along with {number} {food2} and a {size} {animal}.",
    "On the road {he} saw {F}, and they walked on together.",
    "{F} was already there and waved at {him}.",
    "A {size} {animal} followed {him} all the way to the {place}.",
    "{He} was {mood} because {he} wanted to find the {thing}.",
    "{F} asked {him} where the {thing} came from, but {he} did not know.",
    "{H} told {F} that the {thing} belonged to the {adult}.",
)
TROUBLES = (
    "But the {thing} fell into the water and was gone.",
    "Then the {animal} took the {thing} and ran away to the {place2}.",
    "Suddenly {he} heard a strange noise behind the {place2}.",
    "When {he} looked again, the {look} {thing} was not there.",
    "The wind blew so hard that {she} lost {hers} way.",
    "It became dark, and {F} was {mood} and wanted to go home.",
    "The {adult} said that nobody could open the door without the {thing}.",
    "Soon it began to rain, and the path to the {place2} was closed.",
    "{F} could not find the {animal} and started to cry.",
)
MIDDLES = (
    "{H} thought about it for a long time.",
    "{He} {way} looked under the {place3} table and found nothing.",
    "{She} said that they should ask the {adult} at the {place2}.",
    "They ran to the {place2} and called for the {animal}.",
    "{H} gave {F} some {food} and told {her} not to be {mood2}.",
    "The {adult} smiled and showed them a way through the {place2}.",
    "The {animal} sat {way} next to {him} and ate the {food}.",
    "After {number} days they came back to the {place}.",
    "{He} climbed up and looked out over the {place2} and the {place}.",
    "{F} held the light while {H} {way} pulled the {thing} out.",
    "{She} wanted to help, so {she} brought {number} old ropes from home.",
    "They waited and waited, but only the {animal} came.",
    "{H} knew the {place2} well, and {F} knew a song about it.",
    "Nobody in the {place2} had ever seen a {look} {thing} before.",
    "{He} counted to {number} and opened {his} eyes.",
    "The sun went down behind the {place2}, and the sky turned {colour}.",
)
ENDINGS = (
    "In the end {he} found the {thing} under a tree and gave it to {F}.",
    "At last the {animal} came back with the {thing}, and {H} was {mood}.",
    "The {adult} thanked {F} and gave {her} warm {food}.",
    "They all went home, ate {food} and fell asleep.",
    "{H} and {F} were best friends from that day on.",
    "{He} put the {look} {thing} on the shelf, where it still is today.",
    "That {time} {F} told the story of the {thing} again, and everyone laughed.",
    "The {size} {animal} stayed with {H} for many years.",
)
PARTS = ((OPENINGS, 1, 1), (MEETINGS, 1, 2), (TROUBLES, 1, 2), (MIDDLES, 2, 5), (ENDINGS, 1, 2))


def story(rng: random.Random) -> str:
    """One story of 6 to 12 sentences. One space precedes every word, also the first."""
    boy, friend_is_boy = rng.random() < 0.5, rng.random() < 0.5
    hero = rng.choice(BOYS if boy else GIRLS)
    friend = rng.choice([n for n in (BOYS if friend_is_boy else GIRLS) if n != hero])
    he, him, his = ("he", "him", "his") if boy else ("she", "her", "her")
    she, her, hers = ("he", "him", "his") if friend_is_boy else ("she", "her", "her")
    place, place2, place3 = rng.sample(PLACES, 3)
    cast = dict(H=hero, F=friend, he=he, him=him, his=his, He=he.title(), His=his.title())
    cast |= dict(she=she, her=her, hers=hers, She=she.title())
    cast |= dict(place=place, place2=place2, place3=place3, animal=rng.choice(ANIMALS))
    cast |= dict(thing=rng.choice(THINGS), look=rng.choice(LOOKS), adult=rng.choice(ADULTS))
    cast |= dict(size=rng.choice(SIZES), weather=rng.choice(WEATHER), season=rng.choice(SEASONS))
    sentences = []
    for templates, least, most in PARTS:
        for template in rng.sample(templates, rng.randint(least, most)):
            cast |= dict(mood=rng.choice(MOODS), mood2=rng.choice(MOODS), time=rng.choice(TIMES))
            cast |= dict(food=rng.choice(FOODS), food2=rng.choice(("apples", "berries")))
            cast |= dict(
                number=rng.choice(NUMBERS), way=rng.choice(WAYS), colour=rng.choice(COLOURS)
            )
            sentences.append(" " + template.format(**cast))
    return "".join(sentences)


def text(num_characters: int, seed: int) -> str:
    """At least `num_characters` characters of stories, one story per line."""
    rng, stories, length = random.Random(seed), [], 0
    while length < num_characters:
        stories.append(story(rng) + "\n")
        length += len(stories[-1])
    return "".join(stories)


def words() -> list[str]:
    """The distinct words of all stories, sorted. They are the tokenizer's pieces."""
    sentences = " ".join(sentence for part, _, _ in PARTS for sentence in part)
    literal = {w.strip(".,") for w in sentences.split() if "{" not in w}
    pronouns = "he him his she her He His She Her".split()
    lists = (
        BOYS, GIRLS, ADULTS, ANIMALS, PLACES, THINGS, LOOKS, SIZES, MOODS, FOODS, WEATHER, TIMES,
        SEASONS, NUMBERS, WAYS, pronouns,
    )  # fmt: skip
    return sorted(literal.union(*lists))
