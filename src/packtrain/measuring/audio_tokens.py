"""Audio tokens from the length of a clip: the arithmetic of a Whisper feature extractor, halved twice.

A clip is resampled to the extractor's rate, cut at its window (30 s for Qwen2-Audio, 300 s for Omni),
made into one mel frame per hop, and the encoder halves the frames twice. The cut is counted, never silent:
`audio_cut` is 1 for a clip that is longer than the window.

Trade-off: the formula is that of the Qwen audio encoders. Others count differently from the same frames;
their processors are asked (`measuring.oracle`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, InputError, SampleError
from .expansion import Expansion


@dataclass(frozen=True, kw_only=True)
class AudioRule:
    """Settings of a feature extractor that decide how many tokens a clip takes.

    Attributes:
        token: the audio token.
        rate: Hz after resampling.
        hop: samples from one mel frame to the next.
        window: longest clip in samples; the rest is cut off.
    """

    token: str
    rate: int
    hop: int
    window: int

    def samples(self, frames: int, sample_rate: int) -> int:
        """Samples after resampling `frames` of `sample_rate` Hz: rounded up."""
        return -(-frames * self.rate // sample_rate)

    def mel_frames(self, samples: int) -> int:
        """Mel frames of a clip of `samples` at the extractor's rate, after the cut."""
        return min(-(-min(samples, self.window) // self.hop), self.window // self.hop)

    def tokens(self, mel_frames: int) -> int:
        """Tokens of `mel_frames`.

        Raises:
            InputError: more frames than the window holds: samples were given for mel frames.
        """
        if mel_frames > self.window // self.hop:
            raise InputError(
                f"{mel_frames} mel frames; the window holds {self.window // self.hop}",
                hint="give mel frames, not samples",
            )
        return ((mel_frames - 1) // 2 - 1) // 2 + 1

    def expand(self, frames: int, sample_rate: int) -> Expansion:
        """One clip of `frames` at `sample_rate` Hz.

        Raises:
            SampleError: `unsupported_media`, a clip too short for one token.
        """
        samples = self.samples(frames, sample_rate)
        mel = self.mel_frames(samples)
        count = self.tokens(mel)
        if count < 1:
            raise SampleError(
                "unsupported_media",
                f"a clip of {frames} frames at {sample_rate} Hz is too short: it has {mel} mel frames",
                hint="drop clips under 30 milliseconds",
            )
        costs = {"audio_frames": mel, "audio_cut": int(samples > self.window)}
        return Expansion(self.token, (count,), costs)


def audio_rule(processor: Any, token: str) -> AudioRule:
    """Read the rule from a processor's feature extractor.

    Raises:
        ConfigError: it has no Whisper settings.
    """
    extractor = getattr(processor, "feature_extractor", None)
    try:
        rule = AudioRule(
            token=token,
            rate=int(extractor.sampling_rate),  # type: ignore[union-attr]
            hop=int(extractor.hop_length),  # type: ignore[union-attr]
            window=int(extractor.n_samples),  # type: ignore[union-attr]
        )
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f"{type(extractor).__name__} has no sampling_rate, hop_length and n_samples",
            hint="use the feature extractor that belongs to the model family",
        ) from None
    if min(rule.rate, rule.hop, rule.window) < 1:
        raise ConfigError(f"feature extractor settings are impossible: {rule}")
    return rule
