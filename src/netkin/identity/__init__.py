"""Identity: digests by which weights, data, settings and functions are known again.

Results and parts of results carry them, so that what belongs to other weights or other data is noticed.
"""

from netkin.identity.data import DataDigest, UnorderedDigest
from netkin.identity.digests import described_call, function_digest, in_words, settings_digest, weights_digest

__all__ = [
    "DataDigest",
    "UnorderedDigest",
    "described_call",
    "function_digest",
    "in_words",
    "settings_digest",
    "weights_digest",
]
