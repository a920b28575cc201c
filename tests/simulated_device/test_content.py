"""The simulated device's answers follow from content and seed alone."""

import numpy as np

from omni_simulated_device import content
from omni_simulated_device.config import StageSettings

KEY = content.content_key(0, "text", [1, 2, 3], None)
TOKENS = [82, 67, 76, 89]
FRAME = [827, 349, 834, 1478]
SAMPLES = "6666c3bcf3e6c6bd382e02be"


def test_values_are_fixed_across_processes() -> None:
    """Tokens, frames and samples are the same numbers in any process, so recorded captures stay comparable."""
    assert [content.text_token(KEY, index) for index in range(4)] == TOKENS
    assert content.codec_frame(KEY, 0, 4) == FRAME
    assert content.frame_samples(FRAME, 3).tobytes().hex() == SAMPLES


def test_samples_follow_from_every_code() -> None:
    """Changing any one code of a frame changes its audio."""
    frame = content.codec_frame(KEY, 0, 16)
    reference = content.frame_samples(frame, 1920)
    assert np.abs(reference).max() <= 0.2
    for place in range(16):
        changed = [*frame]
        changed[place] = changed[place] % (content.CODEBOOK_SIZE - 1) + 1
        assert not np.array_equal(reference, content.frame_samples(changed, 1920))


def test_audio_follows_from_the_text_where_the_settings_say_so() -> None:
    """Frames by text token; without the setting, or where no text is seen, a number between the limits."""
    by_limits = StageSettings(min_frames=7, max_frames=7)
    by_text = StageSettings(min_frames=7, max_frames=7, frames_per_token=5.0)
    assert [content.speech_frames(KEY, by_text, tokens, 0) for tokens in (0, 103)] == [7, 515]
    assert [content.speech_frames(KEY, by_limits, tokens, 0) for tokens in (3, 9)] == [7, 9]
