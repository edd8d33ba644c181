"""Replicas, parts and copies: evidence from initial values, stages and exchanges, on records of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moeverify.results.guard import DriftFacts, TokenFacts
from moeverify.results.script import CopyFacts
from moeverify.scripts.guard.copies import CopyRule
from moeverify.scripts.guard.judge import add_sites, find_stages
from moeverify.scripts.guard.lines import GroupLine, PassHashes, RankHeader, StepRecord, SumLine, TensorLine
from moeverify.scripts.guard.replicas import ReplicaRule, find_replicas, find_tied
from moeverify.scripts.guard.tokens import TokenRule
from moeverify.train.calls.call import LoopCall


def make_tensor(name: str, *, is_varied: bool = True, site: str = "") -> TensorLine:
    return TensorLine(name=name, shape=(4,), region="0:4", is_whole=True, is_varied=is_varied, site=site)


def make_headers(
    *tensors: TensorLine, num_ranks: int = 2, data_ranks: tuple[int, ...] = ()
) -> dict[int, RankHeader]:
    return {
        rank: RankHeader(rank=rank, world_size=num_ranks, tensors=tensors, data_ranks=data_ranks)
        for rank in range(num_ranks)
    }


def make_records(*began: Sequence[int], step: int = 0, **changes: object) -> dict[int, StepRecord]:
    """Return a record for each rank, whose tensors begin with these values."""
    return {
        rank: StepRecord.model_validate({"step": step, "rank": rank, "began": own, "ended": own, **changes})
        for rank, own in enumerate(began)
    }


BIAS = make_tensor("up.bias", is_varied=False)


@pytest.mark.parametrize(
    ("tensors", "began", "num_sets"),
    [
        # The bias of a shard is no replica, and that of a replicated layer is one.
        ((BIAS, make_tensor("up.weight")), ((0, 1), (0, 2)), 2),
        ((BIAS, make_tensor("up.weight")), ((0, 1), (0, 1)), 1),
        # A bias beside sharded tensors of its own module, with a replicated module below it.
        ((BIAS, make_tensor("up.weight"), make_tensor("up.inner.weight")), ((0, 1, 3), (0, 2, 3)), 2),
        # A norm without random values of its own has those of the block around it.
        (
            (make_tensor("block.norm.weight", is_varied=False), make_tensor("block.up.weight")),
            ((0, 1), (0, 1)),
            1,
        ),
    ],
)
def test_equal_constants_are_replicas_beside_equal_random_values(
    tensors: tuple[TensorLine, ...], began: tuple[tuple[int, ...], ...], num_sets: int
) -> None:
    equal, _ = find_replicas(make_headers(*tensors), make_records(*began))
    assert sum(each.name == tensors[0].name for each in equal) == num_sets


@pytest.mark.parametrize(
    ("outputs", "module", "num_sets"),
    [((1.0, 1.0), "norm", 1), ((1.0, 2.0), "norm", 2), ((1.0, 1.0), "up", 2)],
)
def test_equal_constants_of_a_module_with_equal_outputs_are_replicas(
    outputs: tuple[float, float], module: str, num_sets: int
) -> None:
    """A module with sharded random values may have equal outputs too: it sums over the ranks."""
    constant = make_tensor(f"block.{module}.bias", is_varied=False)
    headers = make_headers(constant, make_tensor("block.up.weight"))
    records = {
        rank: record.model_copy(update={"outputs": ((f"block.{module}", outputs[rank]),)})
        for rank, record in make_records((0, 1), (0, 2), rows=((5, 6),)).items()
    }
    equal, _ = find_replicas(headers, records)
    assert sum(each.name == constant.name for each in equal) == num_sets


def find_divided(positions: int, *, group: int = 2, **changes: object) -> list[DriftFacts]:
    """Return findings for a vector of 2 of the ranks, each with as many of 8 positions, beside sharded values."""
    norm = make_tensor("block.norm.weight", is_varied=False)
    own = norm.model_copy(update={"num_positions": positions, **changes})
    more = {"num_positions": 8, "groups": (("tp", tuple(range(group))),)}
    headers = {
        rank: header.model_copy(update=more)
        for rank, header in make_headers(own, make_tensor("block.up.weight")).items()
    }
    rule = ReplicaRule(*find_replicas(headers, make_records((0, 1), (0, 2), rows=((5, 6),))), headers)
    records = make_records((7, 1), (8, 2), rows=((5, 6),), exchanged=((0, 1),), losses=(3.0,))
    for rank in records:
        changed = {"gradients": (rank + 5, 9), "squares": (1.0, 1.0), "before": (1.0 + rank, 1.0)}
        numbers = {"norms": (1.0, 1.0), "projections": ((0.5 + rank,) * 4, (0.5,) * 4)}
        records[rank] = records[rank].model_copy(update=changed | numbers)
    return [each.facts for each in rule.find(records) if isinstance(each.facts, DriftFacts)]


@pytest.mark.parametrize(
    "positions", [4, 5]
)  # 8 of 8, and of a sequence that is padded to 5 in each of 2 rows
def test_a_vector_on_a_part_of_the_sequence_is_a_replica(positions: int) -> None:
    (facts,) = find_divided(positions)
    assert facts.names == ("block.norm.weight",)
    assert facts.cause is not None
    assert (facts.cause.kind, facts.cause.counts) == ("sequence", (positions, 8))


def test_a_vector_on_a_part_of_the_heads_is_a_replica() -> None:
    (facts,) = find_divided(24)
    assert facts.cause is not None
    assert facts.cause.kind != "sequence"


@pytest.mark.parametrize("positions", [0, 2, 7, 8, 20])
def test_a_vector_on_all_positions_may_be_a_part(positions: int) -> None:
    assert not find_divided(positions)


def test_parts_of_a_sequence_are_told_from_other_parts() -> None:
    assert not find_divided(4, group=4)
    assert not find_divided(4, shape=(4, 4))  # a sharded matrix of zeros, whose products are added up
    assert not find_divided(4, name="block.experts.0.bias")


def test_data_parallel_ranks_need_no_random_values() -> None:
    headers = make_headers(BIAS, data_ranks=(0, 1))
    assert len(find_replicas(headers, make_records((0,), (0,)))[0]) == 1


def make_messages(*pairs: tuple[int, int, int]) -> tuple[GroupLine, ...]:
    """Return the messages of a rank: sender, receiver, and number before its first backward pass."""
    return tuple(
        GroupLine(name="0", ranks=(one, two), is_message=True, number=4, num_before=number, hash=1)
        for one, two, number in pairs
    )


def test_stages_follow_from_the_messages_before_the_first_backward_pass() -> None:
    # Rank 0 has got a gradient when its first backward pass begins; later stages have not.
    groups = [
        make_messages((0, 1, 2), (1, 0, 1)),
        make_messages((0, 1, 2), (1, 0, 0), (1, 2, 1), (2, 1, 1)),
        make_messages((1, 2, 1), (2, 1, 0)),
    ]
    records = {rank: StepRecord(step=0, rank=rank, groups=each) for rank, each in enumerate(groups)}
    assert find_stages(records) == {0: 0, 1: 1, 2: 2}
    ring = {
        rank: StepRecord(
            step=0, rank=rank, groups=make_messages(((rank - 1) % 3, rank, 2), (rank, (rank + 1) % 3, 2))
        )
        for rank in range(3)
    }
    assert set(find_stages(ring).values()) == {0}


def test_tensors_of_stages_are_copies_and_no_replicas() -> None:
    headers, records = make_headers(make_tensor("layer.up")), make_records((1,), (1,))
    equal, unequal = find_replicas(headers, records, {0: 0, 1: 1})
    assert ([each.ranks for each in equal], unequal) == ([(0,), (1,)], [])
    (finding,) = CopyRule(headers, {0: 0, 1: 1}).find(records)
    assert isinstance(finding.facts, CopyFacts)
    assert finding.facts.kind == "siblings"
    assert not CopyRule(headers, {}).find(records)


@pytest.mark.parametrize(
    ("change", "stages", "num_sets"),
    [
        ({}, {0: 0, 1: 1}, 1),
        ({}, {0: 0, 1: 0}, 0),
        ({"name": "layers.0.decay"}, {0: 0, 1: 1}, 0),  # a pattern of every layer
        ({"is_varied": False}, {0: 0, 1: 1}, 0),
        ({"is_whole": False}, {0: 0, 1: 1}, 0),
        ({"shape": (16,)}, {0: 0, 1: 1}, 0),
    ],
)
def test_a_matrix_of_two_stages_with_equal_random_values_is_tied(
    change: dict[str, object], stages: dict[int, int], num_sets: int
) -> None:
    embed = make_tensor("embed").model_copy(update={"shape": (4, 4), **change})
    found = find_tied(make_headers(embed), make_records((1,), (1,)), stages)
    assert [each.ranks for each in found] == [(0, 1)] * num_sets
    assert not find_tied(make_headers(embed), make_records((1,), (2,)), stages)


def find_copied_sums(
    first: int, second: int, *, data_ranks: tuple[int, ...] = (), began: int = 1
) -> list[str]:
    headers = make_headers(make_tensor("up"), make_tensor("down"), data_ranks=data_ranks)
    rule, kinds = CopyRule(headers, {}), []
    for step in range(3):
        records = make_records(*(((1, 2), (began, 2)) if step == 0 else ((), ())), step=step)
        for rank, bits in ((0, first), (1, second)):
            line = SumLine(ranks=(0, 1), site="/home/model.py:7 in forward", hash=bits)
            records[rank] = records[rank].model_copy(update={"sums": (line,)})
        found = [each.facts for each in rule.find(records) if isinstance(each.facts, CopyFacts)]
        kinds += [f"{facts.kind} {step} {facts.site}" for facts in found]
    return kinds


def test_equal_operands_of_a_sum_twice_in_a_row_are_copies() -> None:
    assert find_copied_sums(5, 5) == ["sums 1 model.py:7 in forward"]
    assert not find_copied_sums(5, 6)
    assert not find_copied_sums(0, 0)  # constants, such as the result of a layer that begins with zeros
    assert not find_copied_sums(5, 5, data_ranks=(0, 1))


def test_shards_of_dtensors_with_equal_values_are_copies() -> None:
    tensors = [
        make_tensor("up").model_copy(update={"mesh": (0, 1), "region": region}) for region in ("0:2", "2:4")
    ]
    headers = {rank: RankHeader(rank=rank, world_size=2, tensors=(tensors[rank],)) for rank in (0, 1)}
    (finding,) = CopyRule(headers, {}).find(make_records((1,), (1,)))
    assert isinstance(finding.facts, CopyFacts)
    assert finding.facts.kind == "shards"
    assert not CopyRule(headers, {}).find(make_records((1,), (2,)))


GROUPS = (GroupLine(name="0", ranks=(0, 1), number=3, hash=1, largest=1000),)


def find_unsynchronized(
    *, exchanged: tuple[tuple[int, ...], ...] = (), name: str = "router", rows: tuple[int, int] = (1, 2)
) -> list[DriftFacts]:
    """Return the findings for a tensor that ranks hold and update differently, beside one that is reduced."""
    headers = make_headers(make_tensor(name), make_tensor("dense"))
    rule, found = ReplicaRule(*find_replicas(headers, make_records((1, 3), (2, 3))), headers), []
    for step in range(3):
        records = make_records((1, 3), (2, 3), step=step, exchanged=exchanged, groups=GROUPS)
        for rank in records:
            changes = {"gradients": (rank + 5, 9), "squares": (1.0, 1.0), "before": (1.0 + rank, 1.0)}
            more = {"norms": (1.0, 1.0), "projections": ((0.5,) * 4,) * 2, "rows": ((rows[rank],),)}
            records[rank] = records[rank].model_copy(update=changes | more)
        assert rule.has_unequal_replicas(records) is not bool(exchanged)
        found += [each.facts for each in rule.find(records) if isinstance(each.facts, DriftFacts)]
    return found


def test_ranks_that_exchange_no_activations_hold_no_parts() -> None:
    (facts,) = find_unsynchronized()
    assert (facts.names, facts.since) == (("router",), "start")
    assert not find_unsynchronized(exchanged=((0, 1),))
    assert not find_unsynchronized(name="experts.0.up")  # another library may exchange their tokens
    assert not find_unsynchronized(rows=(1, 1))


@pytest.mark.parametrize(
    ("gradients", "groups"),
    [((5, 5, 6, 6), ((0, 1), (2, 3))), ((5, 5, 5, 6), ((0, 1, 2), (3,))), ((5, 6, 7, 8), ())],
)
def test_ranks_that_reduce_over_smaller_groups_are_listed(
    gradients: tuple[int, ...], groups: tuple[tuple[int, ...], ...]
) -> None:
    headers = make_headers(make_tensor("up"), num_ranks=4)
    rule = ReplicaRule(*find_replicas(headers, make_records(*[(1,)] * 4)), headers)
    records = make_records(*[(bits,) for bits in gradients])
    for rank, bits in enumerate(gradients):
        changes = {"gradients": (bits,), "squares": (1.0,), "before": (float(bits),), "norms": (1.0,)}
        more = {"projections": ((float(bits),) * 4,)}
        records[rank] = records[rank].model_copy(update=changes | more)
    (finding,) = rule.find(records)
    assert isinstance(finding.facts, DriftFacts)
    assert finding.facts.groups == groups


def find_tokens(*, losses: float = 0.0, shift: int = 0, seed: int = 0, wrapped: bool = False) -> list[int]:
    """Return the shifts of findings for ranks that draw rows 10, 11, ... from generators with these states."""
    headers = make_headers(make_tensor("up"), data_ranks=(0, 1) if wrapped else ())
    rule, found = TokenRule(headers), []
    for step in range(6):
        records = make_records((1,), (1,), step=step, groups=GROUPS)
        for rank in records:
            row = 10 + step + rank * shift
            state = row + 100 if not rank or not seed else seed + row
            changes = {
                "rows": ((row,),),
                "losses": (1.0 + rank * losses,),
                "passes": (PassHashes(number=step, row=row, states=(state, 7)),),
            }
            records[rank] = records[rank].model_copy(update=changes)
        found += [each.facts.shift for each in rule.find(records) if isinstance(each.facts, TokenFacts)]
    return found


def test_ranks_that_reduce_equal_gradients_are_data_parallel_without_a_wrapper() -> None:
    assert find_tokens() == [0]
    assert not find_tokens(losses=0.5)  # each computes a part of these rows


def test_one_stream_of_rows_that_ranks_draw_at_other_times_is_found() -> None:
    assert find_tokens(shift=2, wrapped=True) == [-2]
    assert not find_tokens(shift=2)
    # The same rows from generators in other states, as in the next epoch or from another start.
    assert not find_tokens(shift=2, seed=1000, wrapped=True)


def test_a_finding_has_the_lines_of_its_calls() -> None:
    headers = make_headers(make_tensor("up", site="model.py:3"), data_ranks=(0, 1))
    calls = tuple(
        LoopCall(step=0, name=name, site=f"train.py:{n}")
        for n, name in enumerate(("backward", "optimizer step"))
    )
    records = {
        rank: StepRecord(step=0, rank=rank, rows=((1,),), calls=calls, data_site="data.py:5")
        for rank in (0, 1)
    }
    rule = TokenRule(headers)
    finding = next(each for _ in range(2) for each in rule.find(records))
    assert [each.site for each in add_sites(finding, records, headers).sites] == ["data.py:5"]
    drift = finding.model_copy(update={"check": "replicas", "tensor": "up"})
    sites = [each.site for each in add_sites(drift, records, headers).sites]
    assert sites == ["train.py:1", "train.py:0", "model.py:3"]
