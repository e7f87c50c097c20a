"""What cannot be constructed is refused on all ranks by one sentence, whichever ranks ask for it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn

import oktopk.torch
from oktopk import METHODS, DistributedOptimizer, GradientAllreduce
from oktopk.buckets import BucketedAllreduce
from oktopk.rows import RowSparseAllreduce

pytestmark = pytest.mark.mpi

SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


class OfSigns(torch.optim.SGD):
    """Another rule under the same settings."""


def optimizer(comm: Any, kind: Any = SGD, tensors: Any = None, **settings: Any) -> DistributedOptimizer:
    given = [nn.Parameter(each) for each in tensors or [torch.zeros(2, 6)]]
    return DistributedOptimizer(kind(given, lr=1.0), comm, **settings)


def embedding(comm: Any, kind: Any = SGD, **settings: Any) -> DistributedOptimizer:
    table = nn.Embedding(9, 4, sparse=True).weight
    return DistributedOptimizer(kind([table], lr=1.0), comm, sparse=[table], **settings)


MAKE: dict[str, Callable[..., Any]] = {
    "reducer": lambda comm, **given: GradientAllreduce(comm, **{"length": 100} | given),
    "buckets": lambda comm, **given: BucketedAllreduce(comm, **{"lengths": [100]} | given),
    "table": lambda comm, **given: RowSparseAllreduce(comm, **{"length": 60, "width": 7} | given),
    "optimizer": optimizer,
    "gradients": lambda comm, **given: optimizer(comm, **{"sends": "gradients"} | given),
    "updates": lambda comm, **given: optimizer(comm, **{"sends": "updates"} | given),
    "auto": lambda comm, **given: optimizer(comm, settings="auto", **given),
    "hosts": lambda comm, **given: optimizer(
        comm, **{"sends": "updates", "replica": "host", "ranks_per_host": 2} | given
    ),
    "overlap": lambda comm, **given: optimizer(comm, **{"overlap": True} | given),
    "hook": oktopk.torch.OkTopkState,
    "embedding": embedding,
}
ON_ONE_RANK: list[tuple[str, dict[str, Any], str]] = [
    ("reducer", {"density": 0.0}, r"density 0.0 is not in \(0, 1\]"),  # others are in test_settings
    ("reducer", {"density": "0.1"}, "density '0.1' is not a number"),
    ("reducer", {"speed": 3}, "speed: unknown setting; valid: "),
    ("reducer", {"method": "topkk"}, "method 'topkk' is not one of dense, "),
    ("reducer", {"length": 0}, r"length 0 is not in \[1, 2147483647\]"),
    ("reducer", {"length": 2**31}, r"length 2147483648 is not in \[1, 2147483647\].*several buckets"),
    *(("reducer", {"length": given}, f"length {given!r} is not an integer") for given in (1.5, "3", None)),
    *(("buckets", {"lengths": [given]}, "lengths .* are not integers") for given in (1.5, "3", None)),
    ("table", {"element_type": "float64"}, "element_type 'float64' is not one of"),
    ("table", {"device": "cuda", "length": 2**33 + 1}, "a table on a GPU has at most 8589934592 rows"),
    ("table", {"nonfinite": "ignore"}, "nonfinite 'ignore'"),
    ("table", {"timeout": -1.0}, "timeout"),
    *(
        ("optimizer", {"tensors": tensors}, sentence)
        for tensors, sentence in (
            ([torch.zeros(2, 6).double()], r".*torch\.float64 on cpu, not torch\.float32"),
            (
                [torch.zeros(3), torch.zeros(3).half()],
                r"parameters are torch\.float32 and torch\.float16: all",
            ),
            ([torch.zeros(3), torch.zeros(3, device="meta")], "parameters are on cpu and meta: all must be"),
            ([torch.zeros(12, device="meta")], "parameters are on meta, not on cpu or cuda"),
            (
                [torch.zeros(2, 12)[:, ::2]],
                r".*\(2, 6\) with strides \(12, 2\) is not contiguous .* clone\(\)",
            ),
            ([torch.zeros(0), torch.zeros(3, 0)], "no parameter that needs a gradient has an element"),
            ([torch.ones(3, dtype=torch.complex64)], r"torch\.complex64 on cpu, not .* .*view_as_real"),
        )
    ),
    ("optimizer", {"clip_norm": -1}, r"clip_norm -1 is not in \[0, inf\)"),
    ("optimizer", {"overlap": 1}, "overlap 1 is not True or False"),
    ("overlap", {"bucket_mb": -1.0}, "bucket_mb -1.0 is not a number in"),
    ("buckets", {"lengths": []}, "there must be one at least"),
    ("buckets", {"lengths": [3, 0]}, "of one element at least each"),
]
ONLY_AUTO = "every='auto' is for settings='auto' and sends='updates'"
UNKNOWN = [("densty", "density"), ("clipnorm", "clip_norm"), ("peer_memry", "peer_memory"), ("zzz", "")]
ON_ALL_RANKS: list[tuple[str, dict[str, Any], str]] = [
    *(
        (
            way,
            {wrong: 0.1},
            rf"{wrong}: unknown setting{right and rf' .did you mean {right}.*'}; valid: .*density",
        )
        for wrong, right in UNKNOWN
        for way in ("reducer", "optimizer", "buckets", "hook")
        if way == "optimizer" or wrong != "clipnorm"
    ),
    *(
        ("optimizer", {name: "cuda"}, f"{name}: unknown")
        for name in ("device", "stream", "length", "problem")
    ),
    *(
        ("reducer", {"levels": "hosts", "ranks_per_host": 1, "method": name}, f"{name} has flat steps only")
        for name in METHODS
        if name not in ("oktopk", "union")
    ),
    ("hook", {"density": 2.0}, r"density 2.0 is not in \(0, 1\]"),
    ("hook", {"sends": "updates"}, "the hook reduces gradients: for updates wrap"),
    ("hook", {"every": 2}, "the hook reduces gradients: for updates wrap"),
    *(
        ("reducer", {"wire": "int8", "method": name}, f"wire 'int8' is not for {name}, which sends plain")
        for name, method in METHODS.items()
        if not method.coded
    ),
    ("reducer", {"exchange": "grid", "method": "union"}, "exchange 'grid' is not for union: it is a way of"),
    ("reducer", {"levels": "nodes"}, "levels 'nodes' is not 'auto', 'flat' or 'hosts'"),
    ("reducer", {"ranks_per_host": -1}, "ranks_per_host -1 is not an integer >= 0"),
    ("optimizer", {"kind": torch.optim.LBFGS}, "LBFGS computes gradients several times a step"),
    ("optimizer", {"kind": ADAMW, "overlap": True}, "overlap=True is for .*; by default AdamW sends updates"),
    ("optimizer", {"sends": "gradients", "every": 2}, "every 2 is for sends='updates'"),
    ("optimizer", {"sends": "weights"}, "sends 'weights' is not one of 'gradients', 'updates'"),
    ("updates", {"density": 0.5}, "density 0.5 is for sends='gradients': above 0.25 steps are dense"),
    ("updates", {"every": 0}, "every 0 is not an integer >= 1"),
    ("updates", {"local_share": 1.5}, r"local_share 1.5 is not in \[0, 1\]"),
    ("updates", {"overlap": True}, "overlap=True is for sends='gradients'"),
    ("embedding", {"sends": "updates"}, "tables with sparse gradients are for sends='gradients'"),
    ("embedding", {"kind": torch.optim.Adam}, "tables with sparse .* or build them with sparse=False$"),
    ("updates", {"method": "dense"}, "method='dense' is for sends='gradients'"),
    ("updates", {"average": False}, "average=False is for sends='gradients'"),
    ("updates", {"replica": "gpu"}, "replica 'gpu' is not one of 'auto', 'rank', 'host', 'summed'"),
    ("hosts", {"levels": "hosts"}, "levels='hosts' is for sends='gradients': take replica='host'"),
    ("hosts", {"levels": "flat"}, "replica='host' is for two levels: leave out levels='flat'"),
    ("hosts", {"sends": "gradients"}, "replica='host' is for sends='updates'"),
    ("hosts", {"method": "gtopk"}, "gtopk has flat steps only"),
    ("reducer", {"settings": "auto"}, "settings: unknown setting"),
    ("optimizer", {"settings": "other"}, "settings 'other' is not None or 'auto': pass each setting by its"),
    ("updates", {"settings": "auto", "every": "auto"}, "every='auto' with compute_ms=None: .* needs"),
    ("updates", {"settings": "auto", "compute_ms": 5.0}, "every=1 with compute_ms=5.0: .* nothing else does"),
    ("updates", {"every": "auto", "compute_ms": 5.0}, ONLY_AUTO),
    ("optimizer", {"settings": "auto", "every": "auto", "compute_ms": 5.0}, ONLY_AUTO),
    ("updates", {"settings": "auto", "every": "auto", "compute_ms": 0}, "compute_ms 0 is not a time > 0"),
    ("optimizer", {"settings": "auto", "wire": "int3"}, "wire 'int3' is not 'auto' or one of"),
    *(
        ("updates", {"residual_decay": power}, "residual_decay .* is not a number >= 0")
        for power in (-1, math.inf, math.nan, True, "2")
    ),
    ("optimizer", {"residual_decay": 2.0}, "residual_decay=2.0 is for sends='updates'"),
]
SHAPES = "shapes, order or memory layouts differ between ranks"
UNLIKE: list[tuple[str, str, Any, Any, str]] = [
    ("reducer", "density", 0.01, 0.02, ""),
    ("reducer", "threshold_interval", 32, 16, ""),
    ("reducer", "nonfinite", "raise", "skip", ""),
    ("reducer", "length", 100, 101, ""),
    ("reducer", "method", "oktopk", "dense", ""),
    ("reducer", "ranks_per_host", 1, 2, ""),
    ("buckets", "lengths", [5, 10], [5, 11], ""),
    ("table", "length", 60, 9, ""),
    ("table", "width", 7, 9, ""),
    ("table", "element_type", "float32", "bfloat16", ""),
    ("optimizer", "broadcast", False, True, ""),
    ("optimizer", "clip_norm", 0.5, 1.0, ""),
    ("optimizer", "tensors", [torch.zeros(3)], [torch.zeros(4)], "ranks disagree on length"),
    ("optimizer", "tensors", [torch.zeros(6, 2)], [torch.zeros(2, 6)], SHAPES),
    ("optimizer", "tensors", [torch.zeros(2, 6)], [torch.zeros(6, 2).t()], SHAPES),
    ("optimizer", "tensors", [torch.zeros(4), torch.zeros(3)], [torch.zeros(3), torch.zeros(4)], SHAPES),
    ("optimizer", "sends", "gradients", "updates", ""),
    ("updates", "every", 1, 2, ""),
    ("optimizer", "settings", None, "auto", ""),
    ("auto", "tensors", [torch.zeros(1)], [torch.zeros(4000)], "ranks disagree on length"),
    ("updates", "density", 0.01, 0.02, ""),
    ("updates", "residual_decay", 1.0, 2.0, ""),
    ("hosts", "replica", "host", "summed", ""),
    *(
        (way, "kind", here, there, f"ranks disagree on optimizer: .*'{there.__module__}.{there.__name__}'")
        for way in ("updates", "gradients")
        for here, there in ((SGD, OfSigns), (ADAMW, oktopk.torch.AdamW))
    ),
]


@pytest.mark.parametrize(("way", "wrong", "sentence"), ON_ONE_RANK)
def test_what_one_rank_gets_wrong_is_refused_on_all(
    comm: MPI.Intracomm, way: str, wrong: dict[str, Any], sentence: str
) -> None:
    culprit = comm.size // 2
    with pytest.raises(ValueError, match=f"rank {culprit}: .*{sentence}"):
        MAKE[way](comm, **wrong if comm.rank == culprit else {})


@pytest.mark.parametrize(("way", "wrong", "sentence"), ON_ALL_RANKS)
def test_settings_that_do_not_go_together_are_refused(
    comm: MPI.Intracomm, way: str, wrong: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence) as refused:
        MAKE[way](comm, **wrong)
    assert len(set(comm.allgather(str(refused.value)))) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("way", "name", "here", "there", "sentence"), UNLIKE)
def test_ranks_that_disagree_all_raise(
    comm: MPI.Intracomm, way: str, name: str, here: Any, there: Any, sentence: str
) -> None:
    last = comm.size - 1
    sentence = sentence or f"ranks disagree on {name}.*rank {last}: {re.escape(repr(there))}"
    with pytest.raises(ValueError, match=sentence):
        MAKE[way](comm, **{name: there if comm.rank == last else here})
