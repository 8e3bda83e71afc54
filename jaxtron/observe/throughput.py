"""From tokens and seconds to the rates that runs are compared by."""

import dataclasses
from typing import Self

import jax

from jaxtron.models.config import ModelConfig
from jaxtron.observe.flops import FlopsPerToken, flops_per_token
from jaxtron.observe.hardware import peak_tflops


@dataclasses.dataclass(frozen=True)
class Throughput:
    """What is needed to turn a step's tokens and seconds into rates per device.

    Attributes:
        flops_per_token: operations of one token in both conventions [FLOP].
        devices: devices of the whole job.
        peak_tflops: peak of one device [TFLOP/s]; None: unknown, so there is no MFU.
    """

    flops_per_token: FlopsPerToken
    devices: int
    peak_tflops: float | None

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
        )

    def rates(self, tokens: int, seconds: float) -> dict[str, float | None]:
        """Rates per device over ``tokens`` of all devices together in ``seconds``.

        Returns:
            ``tokens_per_s_per_gpu``, ``tflops_per_gpu`` (causal attention),
            ``tflops_per_gpu_full_attention`` and ``mfu``: the share of the peak that the causal
            count reaches, None without a peak.
        """
        tokens_per_s = tokens / (seconds * self.devices)
        tflops = tokens_per_s * self.flops_per_token.causal / 1e12
        return {
            "tokens_per_s_per_gpu": tokens_per_s,
            "tflops_per_gpu": tflops,
            "tflops_per_gpu_full_attention": tokens_per_s
            * self.flops_per_token.full_attention
            / 1e12,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
        }
