"""Networks as filter atoms: coefficients that several share, and similarity of many networks without data."""

from netkin.applications.subspaces.networks import NearestNetworks, atom_similarity, nearest_networks
from netkin.applications.subspaces.sharing import Decorrelation, Sharing, share_coefficients

__all__ = [
    "Decorrelation", "NearestNetworks", "Sharing", "atom_similarity", "nearest_networks", "share_coefficients",
]  # fmt: skip
