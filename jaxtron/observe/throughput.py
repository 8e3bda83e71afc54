"""From tokens and seconds to the rates that runs are compared by."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

import jax

from jaxtron.models.config import ModelConfig
from jaxtron.observe.flops import FlopsPerToken, flops_per_key, flops_per_token
from jaxtron.observe.hardware import peak_tflops


class Keys(NamedTuple):
    """Keys that the tokens of packed documents meet, summed over tokens, in both conventions."""

    causal: float
    full_attention: float

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> Self | None:
        """Of some steps' records together; None where rows are not packed."""
        sums = [0.0, 0.0]
        for record in records:
            if "causal_keys" not in record:
                return None
            sums[0] += float(record["causal_keys"])
            sums[1] += float(record["full_keys"])
        return cls(*sums)


@dataclasses.dataclass(frozen=True)
class Throughput:
    """What is needed to turn a step's tokens and seconds into rates per device.

    Attributes:
        flops_per_token: operations of one token in both conventions [FLOP].
        devices: devices of the whole job.
        peak_tflops: peak of one device [TFLOP/s]; None: unknown, so there is no MFU.
        flops_without_attention: operations of one token but for scores and values [FLOP].
        flops_per_key: operations of one token for every key that it meets [FLOP].
    """

    flops_per_token: FlopsPerToken
    devices: int
    peak_tflops: float | None
    flops_without_attention: float = 0.0
    flops_per_key: float = 0.0

    @classmethod
    def of(cls, model: ModelConfig, seq_length: int, peak_override: float | None = None) -> Self:
        """Rates for ``model`` on all devices of the job.

        Args:
            model: the architecture.
            seq_length: tokens in a row of the batch.
            peak_override: ``observe.peak_tflops``.
        """
        return cls(
            flops_per_token=flops_per_token(model, seq_length),
            devices=jax.device_count(),
            peak_tflops=peak_tflops(jax.devices()[0].device_kind, peak_override),
            flops_without_attention=flops_per_token(model, 0).causal,
            flops_per_key=flops_per_key(model),
        )

    def rates(
        self, tokens: int, seconds: float, keys: Keys | None = None
    ) -> dict[str, float | None]:
        """Rates per device over ``tokens`` of all devices together in ``seconds``.

        Args:
            tokens: of whole rows or, with ``keys``, of documents.
            seconds: wall time.
            keys: what the tokens of packed documents meet; None: the rows are whole sequences.

        Returns:
            ``tokens_per_s_per_gpu``, ``tflops_per_gpu`` (causal attention),
            ``tflops_per_gpu_full_attention`` and ``mfu``: the share of the peak that the causal
            count reaches, None without a peak.
        """
        done = FlopsPerToken(*(tokens * each for each in self.flops_per_token))
        if keys is not None:
            products = tokens * self.flops_without_attention
            done = FlopsPerToken(*(products + self.flops_per_key * each for each in keys))
        tera_seconds = 1e12 * seconds * self.devices
        tflops = done.causal / tera_seconds
        return {
            "tokens_per_s_per_gpu": tokens / (seconds * self.devices),
            "tflops_per_gpu": tflops,
            "tflops_per_gpu_full_attention": done.full_attention / tera_seconds,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
        }
