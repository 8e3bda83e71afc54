"""Which kernels a program uses."""

from jaxtron.program import Program


def kernels_of(program: Program) -> dict[str, str]:
    """Who computes attention, the layers' matrix products and the loss.

    Kernels of experts are chosen, and logged, where the layer is compiled.
    """
    config, sizes = program.config, program.sizes
    products: str = config.precision.compute
    if (fp8 := program.plan.fp8) is not None:
        backend = next(iter(fp8.sites.values())).recipe.backend
        products = f"fp8 {config.precision.fp8} {config.precision.fp8_format} ({backend})"
    tokens = program.batch_layout.micro_batch_size * config.data.seq_length // sizes["context"]
    rows = config.model.padded_vocab_size // program.region.vocab_parts
    chunk = program.objective.cross_entropy.chunk(tokens, rows)
    return {
        "attention": program.attention_backend.name,
        "products": products,
        "cross-entropy": f"{min(chunk, tokens)} of {tokens} tokens at a time",
    }
