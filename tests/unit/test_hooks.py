"""Features whose hooks would not be called as their authors expect."""

from functools import partial

import pytest

from allranks import features
from allranks.cluster.features import AskingFeature, NotebookFeature
from allranks.engine.features import RankFeature, RankHooks
from allranks.engine.host.features import HostFeature
from allranks.errors import FeatureFailed
from allranks.hooks import Hooks, check, failure


def made(base, **names):
    return type("Made", (base,), {"__module__": "allranks_lines.rank", **names})


def nothing(self, *_):
    pass


@pytest.mark.parametrize(
    ("base", "name", "closest"),
    [
        (RankFeature, "cell_startd", "cell_started"),
        (RankFeature, "cell_end", "cell_left"),
        (RankFeature, "rank_lost", "rank_died"),
        (RankFeature, "record", "records"),
        (HostFeature, "stopped", "stopping"),
        (NotebookFeature, "message_recieved", "message_received"),
        (AskingFeature, "comand", "command"),
    ],
)
def test_a_misspelled_hook_is_an_error_with_the_closest_one(base, name, closest):
    with pytest.raises(FeatureFailed) as failed:
        check(made(base, **{name: nothing}))
    expected = "NotebookFeature" if base is AskingFeature else base.__name__
    assert str(failed.value) == (
        f"expected hooks of {expected} in the feature allranks_lines.rank, found {name}, which "
        f"would never be called. The closest hook is {closest}: correct the name, or begin it "
        "with an underscore."
    )


@pytest.mark.parametrize("own", [lambda self: None, lambda self, cell, *, more: None])
def test_a_hook_with_other_parameters_is_an_error_with_the_right_ones(own):
    with pytest.raises(
        FeatureFailed, match=r"^expected cell_started\(self, cell: .*RunCell.*\) ->"
    ):
        check(made(RankFeature, cell_started=own))


@pytest.mark.parametrize(
    "own", [lambda self, cell: None, lambda self, *_: None, lambda self, cell, more=1: None]
)
def test_a_hook_may_have_other_names_and_more_defaults(own):
    check(made(RankFeature, cell_started=own, _cell_start=nothing, summary=nothing))


def test_data_of_a_feature_is_no_hook_unless_a_hook_is_data():
    check(made(RankFeature, rank=-1, cell_count=0, started_at=None))
    with pytest.raises(FeatureFailed, match=r"found record, .* The closest hook is records:"):
        check(made(RankFeature, record=()))


def test_a_method_of_another_base_class_is_no_hook():
    class Base:
        start = run = nothing

    check(type("Made", (RankFeature, Base), {"__module__": "allranks_lines.rank"}))


def test_a_feature_with_a_wrong_hook_is_reported_and_left_out():
    reported = []
    hooks = Hooks([made(RankFeature, cell_startd=nothing), made(RankFeature)], reported.append)
    assert len(hooks.features) == 1
    assert "The closest hook is cell_started" in str(reported[0])


def test_the_first_kernel_of_a_feature_is_the_ranks_also_if_another_feature_fails():
    def kernel(self, start):
        raise OSError("no ports are left")

    bringing = [made(RankFeature, kernel=lambda self, start, n=n: f"{start} {n}") for n in (1, 2)]
    hooks = RankHooks([made(RankFeature), made(RankFeature, kernel=kernel), *bringing])
    assert hooks.kernel("kernel") == "kernel 1"
    assert "from kernel, found OSError: no ports are left" in str(hooks.take_failure())
    assert RankHooks([made(RankFeature)]).kernel("kernel") is None


class Listening:
    def listen(self):
        pass

    @classmethod
    def load(cls):
        pass


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (Listening().listen, "listen"),
        (Listening.load, "load"),
        (Listening, "Listening"),
        (nothing, "nothing"),
        (partial(partial(nothing, None), None), "nothing"),
        (partial(Listening().listen), "listen"),
    ],
)
def test_the_failure_of_a_hook_names_the_feature_however_it_is_called(hook, name):
    expected = f"expected the feature {__name__} to return from {name}, found OSError: full. "
    assert str(failure(hook, OSError("full"))).startswith(expected)


@pytest.mark.parametrize("side", ["host", "rank", "notebook"])
def test_the_features_of_allranks_have_the_right_hooks(side):
    for kind in features.load(side):
        check(kind)
