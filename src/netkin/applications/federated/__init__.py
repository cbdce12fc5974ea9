"""Federated learning: clients that train a network together, with personal atoms, and ensembles of similar users."""

from netkin.applications.federated.algorithms import ALGORITHMS, SOURCES, ClientUpdate, plan_for
from netkin.applications.federated.ensembles import Ensembles, similar_users_ensemble, user_similarity
from netkin.applications.federated.federate import federate
from netkin.results.comparison import adjusted_rand, user_clusters
from netkin.results.federation import Federation, load_federation
from netkin.training.class_splits import ClientSplit, split_by_classes

__all__ = [
    "ALGORITHMS", "SOURCES", "ClientSplit", "ClientUpdate", "Ensembles", "Federation", "adjusted_rand", "federate",
    "load_federation", "plan_for", "similar_users_ensemble", "split_by_classes", "user_clusters", "user_similarity",
]  # fmt: skip
