"""What each axis makes of a step: its limits, and the bytes it exchanges, against closed forms."""

import numpy as np
import pytest

from foretell.cluster import load as load_cluster
from foretell.cost import collective
from foretell.errors import InputError
from foretell.plan import Plan, check, estimate, lower
from foretell.plan.check import micro_batches
from foretell.plan.costs import copied_seconds, costs, is_copied, memory, shard_comm, stage
from foretell.plan.layer_cost import layers_of
from foretell.plan.plan import blocks_of, levels
from foretell.plan.prices import reducing
from foretell.plan.unsupported import unsupported
from foretell.predict import predict
from foretell.simulate import simulate
from foretell.workload import load

NODE = load_cluster("dgx-h100:nodes=1")
LONG = load("llama:layers=4,hidden=2048,heads=16,inner=5632,seq=32768,vocab=32000")
MOE = load("moe:layers=2,hidden=1024,heads=16,groups=16,inner=4096,seq=2048")


def plan(**fields):
    return Plan(**{"micro_batch": 1, "framework": "megatron-core"} | fields)


def comm(workload, one):
    """Seconds of exchanges inside one block, forward and backward."""
    c = costs([check(one, workload, NODE)], workload, NODE)
    block = next(i for i, layer in enumerate(workload.layers) if layer.is_block)
    return [float(part.comm[0]) for part in (c.layers[block].forward, c.layers[block].backward)]


def price(op, size, ranks, apart=1):
    return float(collective.price(op, size, levels(NODE, ranks, apart)).seconds)


@pytest.mark.parametrize("axis", ["tp", "cp", "ep"])
def test_an_axis_of_one_exchanges_nothing(axis):
    one = plan(dp=8, global_batch=8)
    assert comm(MOE, one.but(**{axis: 1})) == [0.0, 0.0]
    assert predict(one.but(**{axis: 1}), MOE, NODE) == predict(one, MOE, NODE)


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_context_gathers_keys_and_values(cp):
    size = 2.0 * 2 * 32768 * 2048  # keys and values of all tokens in 16 bits
    ahead, back = comm(LONG, plan(dp=8 // cp, cp=cp, global_batch=8))
    assert ahead == pytest.approx(price("all_gather", size, cp))
    assert back == pytest.approx(price("reduce_scatter", size, cp))


def test_context_splits_long_samples_that_one_rank_cannot_hold():
    alone, rank_samples = (
        predict(plan(dp=8 // cp, cp=cp, global_batch=8 // cp), LONG, NODE) for cp in (1, 8)
    )
    assert rank_samples.step < alone.step  # one sample over eight ranks, or one each
    assert rank_samples.step > alone.step / 8
    assert rank_samples.memory["activations"] < alone.memory["activations"] / 7


def test_states_and_parameters_are_sharded_over_context_ranks_too():
    """FSDP2 flattens both meshes into one; so does the distributed optimizer of Megatron."""
    model = load("llama:layers=4,hidden=1024,heads=8,seq=4096,vocab=32000")
    for zero in (1, 3):
        along, across = (
            memory(plan(dp=8 // cp, cp=cp, zero=zero, global_batch=8), model, NODE)[0]
            for cp in (1, 4)
        )
        assert across.optimizers[0] == pytest.approx(along.optimizers[0])
        assert across.parameters[0] == pytest.approx(along.parameters[0])


def test_tensor_exchanges_twice_each_way():
    size = 2.0 * 32768 * 2048
    ahead, back = comm(LONG, plan(tp=8, global_batch=1))
    assert ahead == back == pytest.approx(2 * price("all_reduce", size, 8))


def test_sequence_parallelism_gathers_and_scatters_instead():
    size = 2.0 * 32768 * 2048
    gather, scatter = (price(op, size, 8) for op in ("all_gather", "reduce_scatter"))
    ahead, back = comm(LONG, plan(tp=8, sp=True, global_batch=1, tp_overlap=False))
    assert ahead == pytest.approx(2 * (gather + scatter))
    assert back == pytest.approx(2 * (gather + scatter) + 2 * gather)  # inputs are gathered again
    split, whole = (
        memory(plan(tp=8, sp=sp, global_batch=1), LONG, NODE)[0] for sp in (True, False)
    )
    assert split.activations[0] < whole.activations[0]


def test_sequence_parallel_collectives_hide_behind_matmuls():
    """All but the first of eight pieces is hidden, and takes a sixth of its time from kernels."""
    shown, hidden = (
        comm(LONG, plan(tp=8, sp=True, global_batch=1, tp_overlap=way)) for way in (False, True)
    )
    assert hidden == pytest.approx([(1 / 8 + 7 / 8 * 0.16) * seconds for seconds in shown])


def test_pytorch_keeps_what_it_gathered_and_hides_the_forward_alone():
    size = 2.0 * 32768 * 2048
    both = 2 * (price("all_gather", size, 8) + price("reduce_scatter", size, 8))
    plain, async_tp = (
        comm(LONG, plan(tp=8, sp=True, global_batch=1, framework="fsdp", tp_overlap=way))
        for way in (False, True)
    )
    assert plain == pytest.approx([both, both])  # its input is there: it is not gathered again
    assert async_tp == pytest.approx([(1 / 8 + 7 / 8 * 0.16) * both, both])


def test_fsdp_gathers_once_a_step_in_a_pipeline():
    """Parameters stay whole and gradients add up until the last micro-batch."""

    def moved(**fields):
        one = plan(dp=4, zero=3, framework="fsdp", **fields)
        c = costs([check(one, LONG, NODE)], LONG, NODE)
        gather, scatter = shard_comm(c, 1, LONG, NODE)
        turns = micro_batches(one)
        return 2 * turns * float(gather[0]), turns * float(scatter[0])

    piped = moved(pp=2, global_batch=32)
    again = moved(tp=2, sp=True, global_batch=32)
    assert piped == pytest.approx(moved(pp=2, global_batch=64))
    assert moved(tp=2, sp=True, global_batch=64) == pytest.approx(tuple(2 * x for x in again))


def test_tokens_cross_the_network_once_for_each_node_they_go_to():
    two = load_cluster("dgx-h100:nodes=2")
    model = load("moe:layers=2,hidden=2048,heads=16,experts=64,top=8,seq=4096")
    query = "dp=16,ep=16,micro_batch=1,global_batch=16,precision=bf16-master,framework="
    core, plain = (
        predict(Plan.parse(query + name), model, two).breakdown["exchange_s"]
        for name in ("megatron-core", "fsdp")
    )
    assert 0.15 < core / plain < 0.5  # 8 experts on 2 nodes: 1 of 4 copies crosses


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_experts_are_reached_by_two_exchanges_each_way(ep):
    size = 2.0 * 2048 * 2 * 1024  # every word goes to two experts
    ahead, back = comm(MOE, plan(dp=8, ep=ep, global_batch=8, ep_dispatch="rank"))
    assert ahead == back == pytest.approx(2 * price("all_to_all", size, ep))


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_gradients_of_experts_are_reduced_between_their_copies(ep):
    one = check(plan(dp=8, ep=ep, global_batch=8, grad_dtype="fp32"), MOE, NODE)
    c = costs([one], MOE, NODE)
    held = stage(c, np.array(layers_of(one, MOE, 0))[:, None], MOE, NODE)
    experts = 2 * 8 * 3 * 1024 * 4096  # layers, experts, three matrices
    others = MOE.parameters - experts
    assert held.weights[0] + held.experts[0] == pytest.approx(others + experts / ep, rel=1e-3)
    shared = 4 * (float(held.weights[0]))
    expected = price("all_reduce", shared, 8)
    if 1 < ep < 8:
        expected += price("all_reduce", 4.0 * experts / ep, 8 // ep, ep)
    assert reducing(c, held, NODE)[0] == pytest.approx(expected)


def test_experts_without_expert_parallelism_are_sharded_as_all_else():
    whole, shared = (
        memory(plan(dp=8, zero=zero, global_batch=8), MOE, NODE)[0].parameters[0] for zero in (0, 3)
    )
    assert shared == pytest.approx(whole / 8)


def test_more_sharding_holds_less_and_hybrid_between():
    two = load_cluster("dgx-a100:nodes=2")
    base = plan(dp=16, global_batch=16, framework="fsdp")
    none, states, kept, hybrid, all_of_it = (
        memory(base.but(zero=zero, shard=shard), LONG, two)[0].peak[0]
        for zero, shard in ((0, 0), (1, 0), (2, 0), (3, 8), (3, 0))
    )
    assert none > states > kept > all_of_it
    assert states > hybrid > all_of_it


def test_copies_are_reduced_beside_the_backward():
    four = load_cluster("dgx-a100:nodes=4")
    model = load("llama:layers=8,hidden=4096,heads=32,seq=4096,vocab=32000")
    one = plan(dp=32, zero=3, global_batch=32, framework="fsdp")
    full, hybrid = predict(one, model, four), predict(one.but(shard=8), model, four)
    late = hybrid.breakdown["reduce_s"] - full.breakdown["reduce_s"]
    each = 2 * model.parameters / 8
    alone = float(collective.price("all_reduce", each, levels(four, 4, 8)).seconds)
    assert late < alone / 3
    found = estimate([one, one.but(shard=8)], model, four).step
    assert found == pytest.approx([full.step, hybrid.step], rel=0.12)


def test_offload_holds_no_optimizer_state_and_takes_longer():
    one = plan(dp=8, zero=1, global_batch=8)
    here, there = (predict(one.but(offload=o), LONG, NODE) for o in (False, True))
    assert there.memory["optimizers"] == 0 < here.memory["optimizers"]
    assert there.step > here.step


MANY = load("moe:layers=4,hidden=2048,heads=16,experts=64,top=8,seq=4096")


def test_expert_exchanges_beside_another_micro_batch_take_less():
    """What the network takes stays; the step waits for what compute does not cover."""
    query = plan(dp=8, ep=8, global_batch=32)
    shown, hidden = (predict(query.but(ep_overlap=way), MANY, NODE) for way in (None, True))
    away = shown.breakdown["exchange_s"]
    assert 0.3 * away < shown.step - hidden.step < away
    assert comm(MANY, query.but(ep_overlap=True)) == [0.0, 0.0]


def test_expert_exchanges_beside_compute_have_a_lane_of_their_own():
    query = check(plan(dp=8, ep=8, global_batch=32, ep_overlap=True), MANY, NODE)
    graph = lower(query, MANY, NODE, detail="layer")
    moved, kernels = graph.select(op="all_to_all"), graph.select(kind="kernel")
    assert len(moved) == 4 * 4 * 2  # layers, micro-batches, ways
    lanes = graph.column("lane")
    assert not set(lanes[moved].tolist()) & set(lanes[kernels].tolist())
    whole = simulate(graph).seconds
    assert whole == pytest.approx(float(estimate([query], MANY, NODE).step[0]), rel=0.04)


@pytest.mark.parametrize("text", ["dp=8,global_batch=8", "dp=4,pp=2,global_batch=32"])
def test_expert_exchanges_need_another_micro_batch_to_hide_behind(text):
    query = Plan.parse(text + ",ep=4,micro_batch=1,framework=megatron-core,ep_overlap=yes")
    with pytest.raises(InputError, match="ep_overlap=yes with"):
        check(query, MANY, NODE)


def test_a_token_is_sent_once_a_node_or_once_an_expert():
    two = load_cluster("dgx-h100:nodes=2")
    query = plan(dp=16, ep=16, global_batch=16, precision="bf16-master")
    node, rank, usual = (
        predict(query.but(ep_dispatch=way), MANY, two).breakdown["exchange_s"]
        for way in ("node", "rank", "")
    )
    assert usual == node
    assert rank > 2 * node


def block_cost(text, model="gpt:layers=4,hidden=2048,heads=16,seq=2048,vocab=32000,dropout=no"):
    workload = load(model)
    c = costs([check(Plan.parse(text), workload, NODE)], workload, NODE)
    at = next(i for i, layer in enumerate(workload.layers) if layer.is_block)
    return c.layers[at], c, workload


def test_pytorch_does_not_run_the_last_matmul_of_a_block_again():
    """`torch.utils.checkpoint` stops at the last tensor it was asked for: the matmul's input."""
    base = "dp=8,micro_batch=1,global_batch=8,precision=bf16-master,recompute=full,"
    torch, _, _ = block_cost(base + "framework=fsdp,zero=3")
    last = 2.0 * 2048 * 8192 * 2048  # tokens, inner, hidden
    assert torch.forward.flops[0] - torch.whole.flops[0] == pytest.approx(last)
    megatron, _, _ = block_cost(base + "framework=megatron-core")
    assert megatron.whole.flops[0] == pytest.approx(megatron.forward.flops[0])
    assert megatron.whole.kernels[0] == pytest.approx(megatron.forward.kernels[0])


def test_fsdp_casts_and_copies_parameters_however_they_are_sharded():
    """Gathered twice, gathered once and kept, or held in fp32: 18, 14 and 12 bytes a parameter."""
    base = "dp=8,micro_batch=1,global_batch=8,precision=bf16-master,framework=fsdp,zero="
    found = {}
    for zero in (0, 2, 3):
        _, c, workload = block_cost(base + str(zero))
        found[zero] = float(sum(copied_seconds(c, 1, workload, NODE))[0])
    assert found[0] < found[2] < found[3]
    assert found[2] / found[0] == pytest.approx(14 / 12, rel=0.05)
    _, c, workload = block_cost(base.replace("=fsdp", "=megatron-core") + "1")
    assert not is_copied(c.plans.plans[0])


def test_what_run_does_not_do_with_experts_is_refused_by_name():
    query = Plan(dp=4, ep=4, micro_batch=1, global_batch=8)
    for field, value in (("ep_overlap", True), ("ep_dispatch", "node")):
        assert any(field in why for why in unsupported(query.but(**{field: value})))
        assert not any(field in why for why in unsupported(query.but(**{field: value}, ep=1)))
    assert not any("ep_" in why for why in unsupported(query.but(ep_dispatch="rank")))


def test_a_replayed_iteration_has_no_host_time_and_replayed_layers_only_that_of_their_experts():
    two = load_cluster("dgx-h100:nodes=2")
    query = plan(dp=16, ep=16, global_batch=16, micro_batch=1, precision="fp8")
    none, layers, whole = (
        costs([check(query.but(cuda_graph=how), MANY, two)], MANY, two).layers
        for how in ("", "layers", "iteration")
    )
    at = next(i for i, layer in enumerate(MANY.layers) if layer.is_block)
    issued = [found[at].forward.host[0] for found in (none, layers, whole)]
    assert issued[0] > 1.5 * issued[1] > 0
    assert issued[2] == 0
    same = [found[at].forward.kernels[0] for found in (none, layers, whole)]
    assert same[0] == pytest.approx(same[1]) == pytest.approx(same[2])
    assert any("cuda_graph" in why for why in unsupported(query.but(cuda_graph="layers")))


def test_padded_experts_are_replayed_with_their_layer():
    shape = "moe:layers=2,hidden=1024,heads=8,groups=8,inner=2048,experts=16,seq=512,vocab=32000"
    issued = []
    for capacity in ("", ",capacity=1"):
        workload = load(shape + capacity)
        query = check(plan(dp=8, ep=8, global_batch=8, cuda_graph="layers"), workload, NODE)
        found = costs([query], workload, NODE).layers
        at = next(i for i, layer in enumerate(workload.layers) if layer.is_block)
        issued.append(float(found[at].forward.host[0]))
    assert issued[0] > 2 * issued[1]


def test_a_token_is_sent_once_to_a_rank_that_has_several_of_its_experts():
    query = plan(dp=8, ep=8, global_batch=8, precision="bf16-master", framework="megatron-core")
    once, each = (
        predict(query.but(ep_dispatch=way), MANY, NODE).breakdown["exchange_s"]
        for way in ("node", "rank")
    )
    assert once < 0.8 * each


def test_what_says_how_experts_are_run_needs_experts():
    dense = load("gpt:layers=4,hidden=1024,heads=8")
    for text in ("ep_overlap=yes", "ep_dispatch=node", "tp=2,sp=yes,etp=1"):
        query = Plan.parse(f"global_batch=64,micro_batch=1,{text}")
        with pytest.raises(InputError, match="has no experts"):
            check(query.but(dp=8 // query.tp), dense, NODE)


def test_blocks_that_do_not_divide_make_room_for_words_and_head():
    """As Megatron's account_for_embedding and account_for_loss, and torchtitan by default."""
    shape = "hidden=1024,heads=8,seq=512,vocab=32000"
    assert blocks_of(Plan(pp=8), load(f"llama:layers=94,{shape}")) == (11, *[12] * 6, 11)
    assert blocks_of(Plan(pp=8), load(f"llama:layers=96,{shape}")) == (12,) * 8
    ahead = blocks_of(Plan(pp=4), load(f"llama:layers=61,mtp=1,{shape}"))
    assert sum(ahead) == 61
    assert ahead[-1] < ahead[0] <= ahead[1]
