"""The order in which prompts of several ranks are shown."""

from allranks.features.prompts.notebook import PromptQueue
from allranks.records.wire import Prompt


class Field:
    problem = ""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ask(self, prompt: str, hidden: bool) -> None:
        self.asked.append(prompt)

    def typed(self) -> str:
        return "typed"


def prompt(rank: int, number: int, text: str) -> Prompt:
    return Prompt(rank, 1, number, text, hidden=False, goes_on=False, interrupted=False)


def test_prompts_are_shown_in_order_of_ranks_and_by_turns():
    field = Field()
    prompts = PromptQueue(field, lambda rank, typed: None, lambda: None, lambda line: None)
    for rank in (2, 0, 1):
        prompts.take(prompt(rank, 1, "?"), ())
    prompts.step()
    prompts.take(prompt(0, 2, "again?"), ())
    while prompts.open:
        prompts.step()
    shown = ["rank 0 │ ?", "rank 1 │ ?", "rank 2 │ ?", "rank 0 │ again?"]
    assert field.asked == shown
