"""Text-only samples: arithmetic word problems with worked, correct answers, and long lessons of them."""

from __future__ import annotations

from .talks import Draws, Talk

_WHO = """
    Ana Ben Chidi Dora Emil Fatima Goran Hana Ivan Jun Kemal Lena Mateo Nadia Omar Petra Rosa Sven Tara
    Uma Viktor Wanda Yusuf Zoe
"""
NAMES = tuple(_WHO.split())
_WHAT = """
    apples books coins tickets stamps pens marbles stickers bottles seeds pears candles buttons cards
    eggs lemons bricks ribbons shells spoons plums tiles jars badges
"""
_THINGS = tuple(_WHAT.split())
_WHERE = "Oslo Lima Accra Kyoto Porto Quito Turin Hanoi Cairo Perth Leeds Davao Ghent Malmo Izmir Cork"
_PLACES = tuple(_WHERE.split())
_WORKERS = ("bakers", "painters", "gardeners", "printers", "pumps", "machines", "weavers", "robots")


def _shop(d: Draws) -> tuple[str, str]:
    name, thing = d.choice(NAMES), d.choice(_THINGS)
    count, price, paid_over = d.integer(3, 24), d.integer(2, 15), d.integer(1, 40)
    cost = count * price
    question = (
        f"{name} buys {count} {thing} at {price} euros each and pays with {cost + paid_over} euros. "
        f"How much change does {name} get?"
    )
    worked = (
        f"The {thing} cost {count} * {price} = {cost} euros. "
        f"The change is {cost + paid_over} - {cost} = {paid_over} euros.\nAnswer: {paid_over}"
    )
    return question, worked


def _share(d: Draws) -> tuple[str, str]:
    name, thing = d.choice(NAMES), d.choice(_THINGS)
    friends, each = d.integer(3, 12), d.integer(4, 30)
    left = d.integer(0, friends - 1)
    total = friends * each + left
    question = (
        f"{name} has {total} {thing} and shares them equally among {friends} friends. "
        f"How many does each friend get, and how many are left over?"
    )
    worked = (
        f"{friends} * {each} = {friends * each}, and {total} - {friends * each} = {left}. "
        f"So each friend gets {each} {thing} and {left} are left over.\nAnswer: {each} and {left}"
    )
    return question, worked


def _road(d: Draws) -> tuple[str, str]:
    start, end = d.some(_PLACES, 2)
    speed, hours, more = d.integer(4, 11) * 10, d.integer(2, 6), d.integer(1, 9) * 15
    way = speed * hours + more
    question = (
        f"A bus leaves {start} for {end}. It drives {hours} hours at {speed} km per hour and then "
        f"another {more} km. How long is the way?"
    )
    worked = (
        f"In {hours} hours it drives {hours} * {speed} = {speed * hours} km. "
        f"With the rest that is {speed * hours} + {more} = {way} km.\nAnswer: {way} km"
    )
    return question, worked


def _percent(d: Draws) -> tuple[str, str]:
    thing, rate, hundreds = d.choice(_THINGS), d.integer(1, 9) * 5, d.integer(2, 18)
    whole = hundreds * 100
    off = rate * hundreds
    question = f"A box of {whole} {thing} loses {rate} percent on the way. How many {thing} arrive?"
    worked = (
        f"{rate} percent of {whole} is {whole} * {rate} / 100 = {off}. "
        f"There arrive {whole} - {off} = {whole - off} {thing}.\nAnswer: {whole - off}"
    )
    return question, worked


def _equation(d: Draws) -> tuple[str, str]:
    a, x, b = d.integer(2, 12), d.integer(2, 20), d.integer(1, 50)
    question = f"Solve for x: {a}x + {b} = {a * x + b}."
    worked = (
        f"Take {b} from both sides: {a}x = {a * x + b} - {b} = {a * x}. "
        f"Divide by {a}: x = {a * x} / {a} = {x}.\nAnswer: x = {x}"
    )
    return question, worked


def _garden(d: Draws) -> tuple[str, str]:
    name, long, wide = d.choice(NAMES), d.integer(6, 40), d.integer(3, 25)
    ring, area = 2 * (long + wide), long * wide
    question = (
        f"{name} puts a fence around a garden {long} m long and {wide} m wide. "
        f"How many metres of fence are needed, and how large is the garden?"
    )
    worked = (
        f"The fence is 2 * ({long} + {wide}) = 2 * {long + wide} = {ring} m. "
        f"The area is {long} * {wide} = {area} square metres.\nAnswer: {ring} m and {area} square metres"
    )
    return question, worked


def _crew(d: Draws) -> tuple[str, str]:
    crew, who, hours, other = d.integer(2, 9), d.choice(_WORKERS), d.integer(3, 12), d.integer(2, 9)
    hours *= other  # so that the answer is whole
    question = f"{crew} {who} need {hours} hours for a job. How long would {other} {who} need for it?"
    worked = (
        f"The job takes {crew} * {hours} = {crew * hours} hours of one. "
        f"Shared by {other} that is {crew * hours} / {other} = {crew * hours // other} hours.\n"
        f"Answer: {crew * hours // other} hours"
    )
    return question, worked


def _mean(d: Draws) -> tuple[str, str]:
    name, count, mean = d.choice(NAMES), d.integer(3, 5), d.integer(10, 60)
    scores = [mean + d.integer(-8, 8) for _ in range(count - 1)]
    scores.append(mean * count - sum(scores))
    listed = ", ".join(map(str, scores))
    question = f"In {count} games {name} scores {listed} points. What is the average?"
    worked = (
        f"The sum is {' + '.join(map(str, scores))} = {mean * count}. "
        f"Divided by {count} games: {mean * count} / {count} = {mean}.\nAnswer: {mean}"
    )
    return question, worked


def problem(d: Draws) -> tuple[str, str]:
    """A question and its worked answer; the answer is right."""
    return d.choice((_shop, _share, _road, _percent, _equation, _garden, _crew, _mean))(d)


def problem_talk(d: Draws) -> Talk:
    """One problem; sometimes a second one that follows it."""
    talk = Talk("maths")
    for _ in range(d.choice((1, 1, 1, 2))):
        question, worked = problem(d)
        talk.ask(question)
        talk.answer(worked)
    return talk
