"""The arithmetic of a plan, step by step, with its numbers put in."""

from __future__ import annotations

from collections.abc import Iterator

from turboquant.planner.pages import WINDOW, Group, state_bytes
from turboquant.planner.plan import PAYS, FormatPlan, Plan
from turboquant.planner.shape import DTYPE_BYTES, FULL, RECURRENT, SLIDING

GIB = 2**30
COUNTED_AS = {
    FULL: "⌈{length:,} / {block:,}⌉",
    SLIDING: "⌈min({held:,} − 1 + {flight:,}, {length:,}) / {block:,}⌉ + 1",
    RECURRENT: "{states} state(s): one, and with prefix caching one that is kept",
    WINDOW: "1 + ⌈{held:,} / {block:,}⌉ + 1: the first block and the newest tokens",
}


def explain(plan: Plan) -> Iterator[str]:
    """Lines of text, headings without indentation."""
    yield from _layers(plan)
    yield from _state(plan)
    yield from _weights(plan)
    yield from _budget(plan)
    for of_format in plan.formats:
        yield from _format(plan, of_format)
    if plan.wish.gpu:
        yield from _speed(plan)


def _layers(plan: Plan) -> Iterator[str]:
    shape = plan.shape
    yield "Layers"
    parts = [f"{shape.count(kind)} {kind}" for kind in (FULL, SLIDING, RECURRENT) if shape.count(kind)]
    yield f"  {' + '.join(parts)} = {len(shape.layers)} layers; {shape.kv_layers} of them hold K and V of tokens"
    window = f", sliding window {shape.sliding_window:,}" if shape.sliding_window else ""
    yield f"  {shape.num_heads} query heads, {shape.num_kv_heads} KV heads, head_dim {shape.head_dim}{window}"
    if plan.serving.tp > 1:
        yield f"  --tp {plan.serving.tp}: {shape.local_kv_heads(plan.serving.tp)} KV heads on each device"


def _state(plan: Plan) -> Iterator[str]:
    state = plan.state()
    if state is None:
        return
    recurrent, tp = plan.shape.recurrent, plan.serving.tp
    conv, main = state_bytes(plan.shape, plan.serving)
    width = DTYPE_BYTES[state["recurrent_dtype"]]
    yield f"State of a sequence ({state['kind']}), whatever its length"
    yield (
        f"  recurrent: {recurrent.heads // tp} heads · {recurrent.head_elements:,} elements · {width} B "
        f"({state['recurrent_dtype']}) = {main:,} B a layer"
    )
    yield (
        f"  convolution: {recurrent.conv_kernel - 1} tokens · {recurrent.conv_channels // tp:,} channels · "
        f"{DTYPE_BYTES[plan.serving.dtype]} B ({plan.serving.dtype}) = {conv:,} B a layer"
    )
    yield f"  {state['layers']} layers · ({main:,} + {conv:,}) = {state['bytes_per_sequence']:,} B"


def _weights(plan: Plan) -> Iterator[str]:
    weights = plan.weights
    yield f"Weights: {weights.total_parameters:,} parameters, {weights.total_bytes / GIB:.2f} GiB ({weights.source})"
    for part, count in weights.parameters.items():
        if count:
            yield f"  {part}: {count:,} parameters, {weights.bytes_by_part[part] / GIB:.2f} GiB"
    if weights.bits:
        yield f"  linear layers are quantised to {weights.bits:.3g} bits, scales included"
    if weights.experts[0]:
        experts, chosen = weights.experts
        yield f"  a token is multiplied by {weights.active_parameters:,} parameters: {chosen} of {experts} experts"
    if weights.parameters.get("vision"):
        yield "  the vision tower is estimated; `vllm serve --language-model-only` leaves it out"


def _budget(plan: Plan) -> Iterator[str]:
    budget = plan.budget
    yield f"Pool for the KV cache: {budget.pool / GIB:.2f} GiB on each device"
    if budget.memory is None:
        yield "  as given with --kv-cache-memory"
        return
    yield (
        f"  {budget.memory / GIB:.2f} GiB · {budget.utilization:g} − weights {budget.weights / GIB:.2f} − activations "
        f"{budget.activations / GIB:.2f} − runtime {budget.runtime / GIB:.2f} GiB"
    )
    yield "  activations by the rule in turboquant/planner/memory.py; the runtime is assumed, not measured (--reserve)"


def _format(plan: Plan, of_format: FormatPlan) -> Iterator[str]:
    shape, serving, paging, cache = plan.shape, plan.serving, of_format.paging, of_format.cache
    slot = cache.slot_bytes(shape.head_dim)
    full = shape.count(FULL)
    yield f"{cache.name}"
    bits = 8 * slot / (2 * shape.head_dim)
    of_token = full * shape.num_kv_heads * slot
    yield f"  slot: {slot} B a token and KV head ({bits:.3f} bits per element, scales included)"
    yield f"  KV: {full} layers · {shape.num_kv_heads} heads · {slot} B = {of_token:,} B a token"
    yield f"  blocks of {paging.block_size:,} tokens; a page is {paging.page_bytes:,} B in every layer"
    for group in paging.groups:
        yield f"    {_group(group, plan)}"
    yield (
        f"  a block: {paging.layers_per_group} layers · {paging.page_bytes:,} B = {paging.block_bytes:,} B; "
        f"pool: ⌊{of_format.pool:,} / {paging.block_bytes:,}⌋ = {of_format.pool // paging.block_bytes:,} blocks"
    )
    yield (
        f"  vLLM reports {of_format.pool // paging.block_bytes:,} / {paging.counted_blocks:,} · "
        f"{serving.max_model_len:,} = {of_format.tokens_that_fit:,} tokens, "
        f"{paging.concurrency(of_format.pool):.2f} sequences of {serving.max_model_len:,}"
    )
    if not paging.starts(of_format.pool):
        yield f"  vLLM will not start: one sequence takes up to {paging.peak_blocks:,} blocks, and one is kept back"


def _group(group: Group, plan: Plan) -> str:
    serving = plan.serving
    how = COUNTED_AS[group.kind].format(
        length=serving.max_model_len, block=group.block_size, held=group.held_tokens, states=group.states,
        flight=serving.batches_in_flight * serving.max_num_batched_tokens,
    )  # fmt: skip
    groups = f"{group.count} group" + "s" * (group.count > 1)
    return (
        f"{group.kind}: {group.layers} layers in {groups}, {group.page_bytes:,} B of a page used; "
        f"{group.counted_pages(serving):,} pages a sequence = {how}"
    )


def _speed(plan: Plan) -> Iterator[str]:
    gpu = plan.wish.gpu
    yield f"Decode on {gpu.name}, at best"
    yield (
        f"  {gpu.bandwidth / 1e12:g} TB/s, {gpu.bf16_flops / 1e12:g} TFLOPS in bf16, {gpu.fp8_flops / 1e12:g} in fp8 "
        f"(data sheet); {gpu.lane_instructions / 1e12:.1f} T lane-instructions/s"
    )
    yield "  step = max(weights / bandwidth, 2·parameters·batch / peak) + max(KV / bandwidth, unpacking)"
    yield "       + 2·states / bandwidth"
    for of_format in plan.formats:
        for row in plan.format_dict(of_format)["contexts"]:
            if row["decode_ms"]:
                yield (
                    f"  {of_format.cache.name}, {row['batch']} sequences at {row['context']:,} tokens: "
                    f"{row['decode_ms']:.3f} ms a step, {row['tokens_per_s']:,.0f} tokens/s"
                )
    yield f"  a cache pays from the context at which a step is {PAYS:.0%} shorter than in auto"
