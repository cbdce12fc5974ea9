"""Identity: digests by which weights, data, settings and functions are recognised.

Results and parts of results carry them, so that a mismatch of weights or data is detected.
"""

from netkin.identity.data import DataDigest, UnorderedDigest
from netkin.identity.digests import (
    described_call,
    function_digest,
    in_words,
    settings_digest,
    weights_digest,
    with_call,
)

__all__ = [
    "DataDigest",
    "UnorderedDigest",
    "described_call",
    "function_digest",
    "in_words",
    "settings_digest",
    "weights_digest",
    "with_call",
]
