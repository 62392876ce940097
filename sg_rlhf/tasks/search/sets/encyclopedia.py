"""A small encyclopedia of invented people and towns, with questions that need it.

Nobody can know the facts, so a question is answered by searching or by luck. One passage says what
a person does and where they live, another where a town lies:

    "Mira Tosk"   Mira Tosk is a weaver from Brem Ford.
    "Brem Ford"   Brem Ford is a town in Halvia on the Sarn.

One-hop questions need one passage; two-hop questions ("In which land does Mira Tosk live?") need
the person's and then the town's. Names are two words of a closed list and answers are words of a
passage, so a tiny tokenizer has an entry for each. The people and the towns of the held-out
questions are in no question to train on, only in the corpus.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from sg_rlhf.tasks.search.data import Question

FIRST_NAMES = (
    "Mira", "Odo", "Tavi", "Hale", "Runa", "Piet", "Lorn", "Esk", "Vela", "Jory", "Nim", "Sable",
    "Corin", "Ysa", "Bram", "Fenna", "Alder", "Kip", "Wren", "Dario",
)  # fmt: skip
LAST_NAMES = (
    "Tosk", "Marrow", "Quill", "Vane", "Holt", "Sorrel", "Pike", "Undry", "Glass", "Karst", "Lome",
    "Thorn", "Ebbet", "Rusk", "Cobb", "Wick", "Farrow", "Zell", "Moss", "Drane",
)  # fmt: skip
TOWN_STARTS = (
    "Brem", "Ost", "Kell", "Dun", "Sal", "Hex", "Mor", "Tarn", "Lis", "Pell", "Gar", "Wyn",
)  # fmt: skip
TOWN_ENDS = ("Ford", "Gate", "Haven", "Bridge", "Mill", "Cross", "Field", "Well")
LANDS = ("Halvia", "Ostrea", "Brundia", "Calvery", "Noria", "Tessaly")
RIVERS = ("Sarn", "Ivel", "Dost", "Murr", "Leth", "Ganna")
CRAFTS = ("weaver", "baker", "smith", "painter", "sailor", "miller", "potter", "tailor")

TRAIN_SOURCES = ("encyclopedia_1hop", "encyclopedia_2hop")
MAX_PEOPLE = len(FIRST_NAMES) * len(LAST_NAMES)
MAX_TOWNS = len(TOWN_STARTS) * len(TOWN_ENDS)


@dataclass(frozen=True)
class Town:
    """A town, the land that it is in and the river that it lies on."""

    name: str
    land: str
    river: str

    @property
    def text(self) -> str:
        return f"{self.name} is a town in {self.land} on the {self.river}."


@dataclass(frozen=True)
class Person:
    """A person, what they do and where they live."""

    name: str
    craft: str
    town: Town

    @property
    def text(self) -> str:
        return f"{self.name} is a {self.craft} from {self.town.name}."


@dataclass(frozen=True)
class Step:
    """One search: the query, the title and the text of the passage that it should bring."""

    query: str
    title: str
    text: str


@dataclass(frozen=True)
class Problem:
    """A question, the searches that answer it, and the answers that a guess would draw from."""

    question: Question
    steps: tuple[Step, ...]
    guesses: tuple[str, ...]

    @property
    def answer(self) -> str:
        return self.question.golds[0]


@dataclass(frozen=True)
class Encyclopedia:
    """The corpus as its records, and the questions; train and test share no person and no town."""

    corpus: list[dict[str, str]]
    train: list[Problem]
    test: list[Problem]


def build(
    seed: int, *, people: int = 200, towns: int = 48, test_share: float = 0.25
) -> Encyclopedia:
    """The encyclopedia of a seed; `test_share` of people and of towns is held out.

    A person has four questions (craft, town, land, river: the last two with two hops), a town two.
    """
    if not 4 <= towns <= MAX_TOWNS:
        raise ValueError(f"towns={towns}: expected 4 to {MAX_TOWNS}")
    if not 4 <= people <= MAX_PEOPLE:
        raise ValueError(f"people={people}: expected 4 to {MAX_PEOPLE}")
    if not 0.0 < test_share < 1.0:
        raise ValueError(f"test_share={test_share}: expected a share between 0 and 1")
    rng = random.Random(f"encyclopedia {seed}")
    town_names = rng.sample([f"{a} {b}" for a, b in product(TOWN_STARTS, TOWN_ENDS)], towns)
    all_towns = [Town(name, rng.choice(LANDS), rng.choice(RIVERS)) for name in town_names]
    test_towns = all_towns[: max(1, round(test_share * towns))]
    train_towns = all_towns[len(test_towns) :]
    person_names = rng.sample([f"{a} {b}" for a, b in product(FIRST_NAMES, LAST_NAMES)], people)
    n_test = max(1, round(test_share * people))
    test_people = [_person(rng, name, test_towns) for name in person_names[:n_test]]
    train_people = [_person(rng, name, train_towns) for name in person_names[n_test:]]
    entries: list[Person | Town] = [*test_towns, *train_towns, *test_people, *train_people]
    entries.sort(key=lambda entry: entry.name)
    corpus = [
        {"id": str(i), "contents": f'"{entry.name}"\n{entry.text}'}
        for i, entry in enumerate(entries)
    ]
    return Encyclopedia(
        corpus,
        _shuffle(rng, _problems(train_people, train_towns)),
        _shuffle(rng, _problems(test_people, test_towns)),
    )


def _person(rng: random.Random, name: str, towns: Sequence[Town]) -> Person:
    return Person(name, rng.choice(CRAFTS), rng.choice(towns))


def _problems(people: Sequence[Person], towns: Sequence[Town]) -> list[Problem]:
    town_names = tuple(town.name for town in towns)
    problems = []
    for town in towns:
        lookup = _step(town)
        one_hop = [
            (f"In which land is {town.name}?", town.land, LANDS),
            (f"On which river is {town.name}?", town.river, RIVERS),
        ]
        problems += [_problem(text, gold, (lookup,), among) for text, gold, among in one_hop]
    for person in people:
        first, second = _step(person), _step(person.town)
        problems += [
            _problem(f"What does {person.name} do?", person.craft, (first,), CRAFTS),
            _problem(f"Where does {person.name} live?", person.town.name, (first,), town_names),
            _problem(
                f"In which land does {person.name} live?", person.town.land, (first, second), LANDS
            ),
            _problem(
                f"On which river does {person.name} live?",
                person.town.river,
                (first, second),
                RIVERS,
            ),
        ]
    return problems


def _step(entry: Person | Town) -> Step:
    return Step(entry.name, f'"{entry.name}"', entry.text)


def _problem(text: str, gold: str, steps: tuple[Step, ...], guesses: tuple[str, ...]) -> Problem:
    source = TRAIN_SOURCES[len(steps) - 1]
    identity = f"{source}_{text.rstrip('?').replace(' ', '_').lower()}"
    return Problem(Question(identity, text, (gold,), source), steps, guesses)


def _shuffle(rng: random.Random, problems: list[Problem]) -> list[Problem]:
    rng.shuffle(problems)
    return problems
