"""The mutants: one mistake each, of the kinds that are made by hand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        name: unique.
        file: path from the root of the checkout.
        old: text that occurs in it exactly once.
        new: what replaces it.
        why: what the mistake is.
        first: arguments of `python -m tests.run` for the tests that are likely to find it; the others follow.
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    first: str


_KERNELS = "--no-single --no-ranks tests/oktopk/test_device_kernels.py"
_ON_THREE = "--no-single --no-host-cuda --ranks 3"
_CUDA_ON_THREE = "--no-single --no-ranks --ranks 3"
_ALONE = "--no-ranks --no-host-cuda"

MUTANTS = (
    # CUDA
    Mutant(
        "kth-ties",
        "oktopk/cuda/kth.cu",
        "    before += search.equal[q];\n",
        "",
        "every rank keeps the ties that lower ranks kept already",
        f"{_CUDA_ON_THREE} tests/oktopk/test_deferred_peers.py tests/oktopk/test_device.py",
    ),
    Mutant(
        "decide-count",
        "oktopk/cuda/decide.cu",
        "for (int r = chosen; r < NUM_CANDIDATES; ++r) count",
        "for (int r = chosen + 1; r < NUM_CANDIDATES; ++r) count",
        "off by one: sums between the chosen candidate and the next are not counted",
        "--no-single --no-ranks tests/oktopk/test_one_rule.py",
    ),
    Mutant(
        "decide-cap",
        "oktopk/cuda/decide.cu",
        "deferred && totals[chosen] <= p.cap && 2 * totals[chosen] >= k",
        "deferred && 2 * totals[chosen] >= k",
        "a deferred step ignores the cap",
        "--no-single --no-ranks tests/oktopk/test_one_rule.py",
    ),
    Mutant(
        "collect-source",
        "collectives/cuda/collect.cu",
        "const int source = (rank - list + ranks) % ranks;",
        "const int source = (rank + list) % ranks;",
        "swapped rank: lists are read in the other rotation than their lengths",
        f"{_CUDA_ON_THREE} tests/oktopk/test_device.py",
    ),
    Mutant(
        "selections-overwritten",
        "collectives/cuda/p2p.cuh",
        "return p2p.step->flags & ODD ? ODD_SELECTED : SELECTED;",
        "return SELECTED;",
        "a second launch overwrites selections that a late rank has yet to read",
        f"{_CUDA_ON_THREE} -k launched_once_more tests/oktopk/test_device.py",
    ),
    Mutant(
        "apply-residual",
        "oktopk/cuda/apply.cu",
        "      if (sent) p.residual[index] = 0.0f;\n",
        "",
        "forgotten clear: an entry that was applied stays in the residual",
        f"{_CUDA_ON_THREE} tests/oktopk/test_device.py",
    ),
    Mutant(
        "accumulate-tail",
        "oktopk/cuda/accumulate_select.cu",
        "        if (at + c < n) residual[at + c] = ej[c];",
        "        if (at + c + 1 < n) residual[at + c] = ej[c];",
        "dropped remainder: the last element of a vector is not accumulated",
        _KERNELS,
    ),
    Mutant(
        "adamw-moments",
        "oktopk/cuda/adamw.py",
        "self._moments[:] = addresses[1:, self._filled].T",
        "self._moments[:] = addresses[:0:-1, self._filled].T",
        "swapped moments: a GPU takes the mean square for the mean",
        _KERNELS,
    ),
    Mutant(
        "counters-cleared",
        "collectives/cuda/sum_sorted_lists.cu",
        "shared.counters[i] = atomicExch(&p.state->counters[i], 0u);",
        "shared.counters[i] = p.state->counters[i];",
        "forgotten clear: counts of one launch are added to those of the next",
        _KERNELS,
    ),
    # selection, regions, error feedback
    Mutant(
        "adamw-count",
        "oktopk/torch/adamw.py",
        "        return self._counts[self._at]\n",
        "        return np.maximum(self._counts[self._at] - 1, 1)\n",
        "off by one: the bias corrections are those of the step before",
        f"{_ON_THREE} tests/oktopk/test_adamw.py",
    ),
    Mutant(
        "exact-short",
        "oktopk/selection.py",
        "if nnz > 2 * k or (exact and nnz < k and bits > 1):",
        "if nnz > 2 * k:",
        "an exact step whose lower threshold was too high keeps fewer than k",
        f"{_ALONE} tests/oktopk/test_selection.py",
    ),
    Mutant(
        "stale-threshold",
        "oktopk/selection.py",
        "        self.bits = max(1, min(bits + moved, NOTHING - 1))",
        "        self.bits = bits",
        "stale threshold: a regular step leaves it as it was",
        f"{_ALONE} tests/oktopk/test_selection.py",
    ),
    Mutant(
        "repack-edge",
        "oktopk/selection.py",
        "edge = max(1, (len(coarse) - 1 - place) << shift)",
        "edge = max(1, (len(coarse) - place) << shift)",
        "off by one: the digit that holds the k-th magnitude is not packed",
        f"{_ALONE} tests/oktopk/test_selection.py",
    ),
    Mutant(
        "regions-agreed",
        "oktopk/regions.py",
        "boundaries[1:-1] = transport.allreduce_control(splits) // size",
        "boundaries[1:-1] = splits",
        "each rank takes the boundaries that it proposed",
        f"{_ON_THREE} tests/oktopk/test_regions.py",
    ),
    Mutant(
        "regions-stale",
        "oktopk/regions.py",
        "return self.splits is not None and (planned or self.stale)",
        "return self.splits is not None and planned",
        "stale regions: one that got too much is not renewed",
        "--no-single --no-ranks --ranks 4 -k too_much tests/oktopk/test_deferred_peers.py",
    ),
    Mutant(
        "regions-forgotten",
        "oktopk/regions.py",
        "        elif self.splits is None:\n",
        "        else:\n",
        "a rank that selected nothing proposes regions of equal length",
        f"{_ON_THREE} tests/oktopk/test_regions.py",
    ),
    Mutant(
        "pruned-lost",
        "oktopk/error_feedback.py",
        "for pruned in result.returned:",
        "for pruned in result.returned[:0]:",
        "what gTopk prunes is not returned to the residual",
        f"{_ON_THREE} tests/oktopk/test_contract.py",
    ),
    Mutant(
        "undo-sign",
        "oktopk/cpu/kernels.py",
        "            residual[i] -= gradient[i]",
        "            residual[i] += gradient[i]",
        "sign: undoing a step adds its gradient once more",
        f"{_ALONE} tests/oktopk/test_gradient_kernels.py",
    ),
    Mutant(
        "ties-of-ranks",
        "oktopk/thresholds.py",
        "ties = np.clip(k - larger - before, 0, ties)",
        "ties = np.clip(k - larger, 0, ties)",
        "every rank keeps the ties that lower ranks kept already",
        f"{_ON_THREE} tests/oktopk/test_thresholds.py tests/oktopk/test_contract.py",
    ),
    # wires
    Mutant(
        "owners-error",
        "oktopk/methods/oktopk.py",
        "errors = (SparseVector(kept, self.length),) if codec.rounds else ()",
        "errors = ()",
        "forgotten residual: what was rounded away of the sums is lost",
        f"{_ON_THREE} tests/oktopk/test_wires.py",
    ),
    Mutant(
        "codec-nearest",
        "collectives/cpu/codec.py",
        "nearer_above = values[i] - lower[i] > upper[i] - values[i]",
        "nearer_above = values[i] < lower[i]",
        "rounding down instead of to the nearest code",
        f"{_ALONE} tests/collectives/test_codec.py",
    ),
    Mutant(
        "values-nearest",
        "collectives/cpu/codec.py",
        "if above - size < size - below:",
        "if above - size < size:",
        "a value becomes the next larger magnitude in place of the nearest",
        f"{_ALONE} tests/collectives/test_sum_values.py",
    ),
    Mutant(
        "decay-again",
        "oktopk/torch/updates/residual_decay.py",
        "        self.last = self.exchanges\n        return factor",
        "        return factor",
        "what was forgotten already is forgotten again in each exchange",
        "--no-single --no-host-cuda --ranks 3 tests/oktopk/test_replicas.py",
    ),
    Mutant(
        "values-errors",
        "oktopk/methods/union.py",
        "returned=(SparseVector(errors, self.length),) if values.rounds else ()",
        "returned=()",
        "forgotten residual: what was rounded away of a union's sums is lost",
        f"{_ON_THREE} tests/oktopk/test_wires.py",
    ),
    Mutant(
        "values-nan",
        "collectives/cuda/codec.cu",
        "      if (largest >= INFINITY_BITS) value = 0x7fc00000u;  // NaN\n",
        "",
        "a sum that is not finite arrives as finite magnitudes",
        "--no-single --no-ranks tests/collectives/test_sum_values.py",
    ),
    # transport, checkpoints, data, schedule
    Mutant(
        "bruck-direction",
        "collectives/allgatherv.py",
        "order[(place - distance) % size], order[(place + distance) % size]",
        "order[(place + distance) % size], order[(place - distance) % size]",
        "swapped ranks in an allgatherv whose ranks are no power of two",
        "--no-single --no-host-cuda --ranks 8 tests/collectives/test_allgatherv.py",
    ),
    Mutant(
        "checkpoint-digest",
        "jobs/restart/files.py",
        "if measured != written:",
        "if not measured.sha256:",
        "the checksum of a checkpoint's part is not checked",
        f"{_ALONE} tests/jobs/restart/test_files.py",
    ),
    Mutant(
        "prepared-checksum",
        "jobs/restart/start.py",
        "elif checksum and info.data and checksum != info.data:",
        "elif not checksum and info.data:",
        "a run continues with other data of the same name",
        f"{_ALONE} tests/jobs/restart/test_start.py",
    ),
    Mutant(
        "warmup-step",
        "jobs/train/optimizers.py",
        "risen = min(1.0, (step + 1) / warmup)",
        "risen = min(1.0, step / warmup)",
        "off by one: a warm-up ends a step late",
        f"{_ALONE} tests/jobs/config/test_config.py",
    ),
    Mutant(
        "evaluation-remainder",
        "data/batches.py",
        "range(used * rank // size, used * (rank + 1) // size)",
        "range(used // size * rank, used // size * (rank + 1))",
        "dropped remainder: some held-out samples are on no rank",
        f"{_ALONE} tests/data/test_sharding.py",
    ),
    Mutant(
        "next-token",
        "data/text/loader.py",
        "TokenBatch(tokens, tokens.roll(-1, dims=1)",
        "TokenBatch(tokens, tokens.roll(-2, dims=1)",
        "off by one: a token is told the one after the next",
        f"{_ALONE} tests/data/test_text.py",
    ),
    Mutant(
        "replica-ranks",
        "oktopk/torch/updates/host_reference.py",
        "        vector.mul_(self._ranks)\n",
        "",
        "a host counts as one rank",
        f"{_ON_THREE} tests/oktopk/test_replicas.py tests/oktopk/test_kinds_of_replicas.py",
    ),
    Mutant(
        "shards-read",
        "oktopk/host_group.py",
        "            if self._being_read:\n",
        "            if False:\n",
        "a shard is written while other ranks of the host still copy it",
        f"{_ON_THREE} tests/oktopk/test_levels.py -k slow_rank",
    ),
    Mutant(
        "replica-shards",
        "oktopk/torch/updates/reference_parameters.py",
        "            self.residual.put()\n        torch",
        "            pass\n        torch",
        "what is written within `agreed` stays in the shards of the residual",
        f"{_ON_THREE} tests/oktopk/test_replicas.py tests/oktopk/test_kinds_of_replicas.py",
    ),
    Mutant(
        "shard-rounding",
        "oktopk/torch/updates/host_reference.py",
        ".sub_(share).to(self._tensors[0].dtype)",
        ".sub_(share)",
        "what bfloat16 rounds away of parameters counts as a move of the optimizer",
        f"{_ON_THREE} tests/oktopk/test_kinds_of_replicas.py",
    ),
    Mutant(
        "writes-unsaved",
        "oktopk/torch/updates/state.py",
        "            self._take_written()\n        with self._lent(), self._memory.stream_scope():\n            state =",
        "            pass\n        with self._lent(), self._memory.stream_scope():\n            state =",
        "a state lacks what was written into parameters since the last step",
        f"{_ON_THREE} tests/oktopk/test_kinds_of_replicas.py",
    ),
    Mutant(
        "moments-kept",
        "oktopk/torch/updates/state.py",
        "                self._selecting.forget()\n",
        "                pass\n",
        "moments that a load replaced stay in memory",
        f"{_ON_THREE} tests/oktopk/test_adamw.py",
    ),
    Mutant(
        "tables-alone",
        "oktopk/torch/engine.py",
        "report = self.bucketed.finish(all_or_none)\n        except BaseException:\n            self.tables.take_back()\n",
        "report = self.bucketed.finish(all_or_none)\n        except BaseException:\n",
        "tables count a step that the rest has not taken",
        f"{_ON_THREE} tests/oktopk/test_tables.py",
    ),
    Mutant(
        "hook-deaf",
        "oktopk/torch/hooked.py",
        "            self.hear(self._agreement, report, self._token, problem)\n",
        "            pass\n",
        "under DDP learning rates of the ranks may part",
        f"{_ON_THREE} tests/oktopk/test_ddp_as_torch_alone.py",
    ),
)
