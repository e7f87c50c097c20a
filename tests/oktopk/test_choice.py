"""What settings="auto" takes over given links, and where it takes the defaults."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

from collectives.codec import WIRES
from oktopk.plan import choice
from oktopk.plan.choice import Choice, Wanted, choose, predicted
from oktopk.plan.rows import LEAST_GRID
from oktopk.replay import prediction
from oktopk.replay.links import LinksError
from oktopk.settings import Settings
from tests.links import MODEL, document
from tests.threads import ThreadTransport, on_threads

SLOW, FAST = 8e-8, 1e-11
"""Seconds of a byte."""


def links(count: int, ranks_per_host: int, between: float, inside: float = 1e-10) -> dict[str, Any]:
    alone = [{"bytes": 1 << 23, "seconds": 1.0}]
    levels: dict[str, Any] = {"between": {"model": MODEL | {"G": between}, "latency": 2e-5, "alone": alone}}
    if ranks_per_host > 1:
        levels["inside"] = {"model": MODEL | {"G": inside}}
    return document(count, ranks_per_host, kernels=None, **levels)


def wanted(updates: bool = False, compute: float | None = None, **settings: Any) -> Wanted:
    return Wanted(1_000_000, "oktopk", Settings(**settings), "cpu", updates, compute)


def test_a_slow_link_is_spared_bytes_and_the_sentence_says_how_slow_it_is() -> None:
    hosts = [0, 1, 2, 3]
    slow = predicted(links(4, 1, SLOW), hosts, wanted())
    assert slow.settings == {"wire": "float32", "levels": "flat"}
    assert slow.text.startswith("wire='float32', levels='flat', as an exchange is predicted to take ")
    assert slow.text.endswith(" ms over links between hosts of 20.0 us and 0.0125 GB/s, measured")
    assert predicted(links(4, 1, FAST), hosts, wanted()).settings["wire"] == "plain"


@pytest.mark.parametrize("rate", [SLOW, FAST])
def test_no_wire_is_rounded_and_what_the_user_gives_stays(rate: float) -> None:
    hosts, over = [0, 0, 1, 1], links(2, 2, rate)
    for wire in WIRES:
        assert "wire" not in predicted(over, hosts, wanted(wire=wire)).settings
    for levels in ("flat", "hosts"):
        assert "levels" not in predicted(over, hosts, wanted(levels=levels)).settings
    assert predicted(over, hosts, wanted()).settings["wire"] in ("plain", "float32")


def test_levels_of_gradients_follow_the_links_and_those_of_updates_stay() -> None:
    hosts = [0, 0, 1, 1]
    slow_between, slow_inside = links(2, 2, SLOW, FAST), links(2, 2, FAST, SLOW)
    assert "levels" not in predicted(slow_between, hosts, wanted()).settings  # the default: hosts
    assert predicted(slow_inside, hosts, wanted()).settings["levels"] == "flat"
    assert "levels" not in predicted(slow_inside, hosts, wanted(updates=True)).settings
    assert predicted(slow_inside, [0, 0, 0, 1], wanted()).settings["levels"] == "flat"  # one rank on one


def test_entries_go_over_a_grid_where_that_is_predicted_to_be_faster() -> None:
    hosts = [*range(64)]
    fast = predicted(links(64, 1, FAST), hosts, wanted())
    assert fast.settings == {"wire": "plain", "levels": "flat", "exchange": "grid"}
    assert ", exchange='grid', as an exchange is predicted" in fast.text
    for exchange in ("direct", "grid"):
        given = predicted(links(64, 1, FAST), hosts, wanted(exchange=exchange))
        assert "exchange" not in given.settings and ("grid" in given.text) == (exchange == "grid")
    assert "exchange" not in predicted(links(64, 1, SLOW), hosts, wanted()).settings
    few = predicted(links(LEAST_GRID - 1, 1, FAST), hosts[: LEAST_GRID - 1], wanted())
    assert "exchange" not in few.settings
    # of many ranks a grid whose columns differ takes long to replay
    with pytest.raises(LinksError, match="^a grid of 67, whose columns differ, takes long to predict$"):
        predicted(links(67, 1, FAST), [*range(67)], wanted(exchange="grid"))


def check_choice(
    monkeypatch: pytest.MonkeyPatch,
    cells: Iterable[tuple[int, int, int, float, str]],
    compute: float | None = None,
) -> None:
    """What is chosen over many links against the choice of whole replays of all settings; updates by union with compute."""
    seen = set()
    for hosts, many, length, density, device in cells:
        method = "oktopk" if compute is None else "union"
        asked = Wanted(length, method, Settings(density=density), device, compute is not None, compute)
        ranks = [number // many for number in range(hosts * many)]
        for between, gap, inside in product(
            (SLOW, 8e-10, FAST), (2e-6, 5e-5), (1e-10, 1e-8) if many > 1 else (1e-10,)
        ):
            over = links(hosts, many, between, inside)
            over["pairs"] = []
            over["between"]["model"] |= {"g": gap, "o": gap, "L": 5 * gap}
            chosen = predicted(over, ranks, asked)
            with monkeypatch.context() as whole:
                whole.setattr(choice, "least_seconds", lambda *_: 0.0)
                whole.setattr(prediction, "of_one_host", lambda program, _: program)
                assert predicted(over, ranks, asked) == chosen
            seen.add((str(chosen.settings), chosen.every))
    assert len(seen) > 2


def test_the_choice_is_that_of_whole_replays_of_all_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    few = (72, 1, 100_000, 0.05, "cpu"), (66, 1, 10_000_000, 0.01, "cuda"), (16, 8, 1_000_000, 0.01, "cpu")
    check_choice(monkeypatch, few)
    check_choice(monkeypatch, [(66, 1, 10_000_000, 0.01, "cpu"), (16, 4, 1_000_000, 0.01, "cpu")], 0.02)


def test_ranks_that_send_unlike_many_entries_are_not_replayed_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of more than a thousand would take as long as a few do where all send alike."""
    monkeypatch.setattr(choice, "MOST_FLAT", 70)
    over, hosts = links(96, 1, SLOW), [*range(96)]
    with pytest.raises(LinksError, match="^steps of 96 ranks that send unlike many entries take long"):
        predicted(over, hosts, Wanted(1_000_000, "gtopk", Settings(), "cpu", False))
    assert predicted(over, hosts, wanted()).settings["wire"] == "float32"


@pytest.mark.long("up to 256 ranks, short and long vectors; `make test` has a few")
@pytest.mark.timeout(900)
def test_so_it_is_over_many_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    clusters, lengths = ((256, 1), (40, 4), (32, 8)), (10**6, 10**8)
    check_choice(monkeypatch, ((*each, length, 0.01, "cpu") for each in clusters for length in lengths))


def test_steps_are_left_out_only_where_the_user_allows_it_and_it_pays() -> None:
    over = links(4, 1, SLOW), [0, 1, 2, 3]
    assert predicted(*over, wanted(updates=True)).every == 1
    assert predicted(*over, wanted(updates=True, compute=100.0)).every == 1
    often = predicted(*over, wanted(updates=True, compute=1e-3))
    assert often.every == 4 and "every=4, as a step is predicted" in often.text


def chosen(size: int, asked: Wanted, kind: type[ThreadTransport] = ThreadTransport) -> str:
    found: list[Choice] = on_threads(size, lambda transport: choose(transport, asked), kind)
    assert all(each == found[0] for each in found)
    assert (found[0].settings, found[0].every) == ({}, 1)
    return found[0].text


def test_the_defaults_are_taken_where_nothing_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmeasured(*_: Any, **__: Any) -> Any:
        raise AssertionError("links are measured")

    monkeypatch.setattr(choice, "links_document", unmeasured)
    assert chosen(1, wanted()) == "the defaults, as one rank has no links"
    assert chosen(2, wanted()).startswith("the defaults, as all ranks share a host")
    apart = wanted(ranks_per_host=1)
    for method in ("dense", "unknown"):
        assert "dense steps" in chosen(2, Wanted(10**6, method, apart.settings, "cpu", False))
    assert "fewer entries than 2 ranks" in chosen(2, Wanted(10, "oktopk", apart.settings, "cpu", False))

    class ByNccl(ThreadTransport):
        by_nccl = True

    assert "NCCL" in chosen(2, Wanted(10**6, "oktopk", apart.settings, "cuda", False), ByNccl)
    slow = links(2, 1, SLOW)
    slow["between"]["alone"] = [{"bytes": 128, "seconds": 3e-5}]
    monkeypatch.setattr(choice, "links_document", lambda *_, **__: slow)
    assert "bandwidth is not known within 2 s" in chosen(2, apart)
    monkeypatch.setattr(choice, "MOST_HOSTS", 1)
    slow["between"]["alone"][0]["seconds"] = 1.0
    assert "flat steps of more than 1 ranks" in chosen(2, apart)
