"""Flower: a client app and a strategy by which the federated algorithms run in real federations.

Both are made for the same network, algorithm and options; the weights are those of `nk.federate` up to rounding. The
personal weights of a client are kept in the state of its node, and are never sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin.applications.federated.algorithms import (
    ClientUpdate,
    FederatedPlan,
    RoundWork,
    averaged,
    mean_loss,
    plan_for,
    received_updates,
    require_fraction,
)
from netkin.applications.federated.local_training import (
    LocalTraining,
    as_array,
    checked_clients,
    load_state,
    local_recipe,
    state_of,
)
from netkin.errors import InvalidValue, import_optional, require_at_least
from netkin.results.federation import RoundRecord
from netkin.sources.batches import LabelledData
from netkin.sources.weights import StateDict
from netkin.training import Recipe, accuracy

DataOf = Callable[[Any], tuple[str, Any]]
ARRAYS, CONFIG, METRICS, KEPT = "arrays", "config", "metrics", "netkin.kept"


def client_app(
    model: nn.Module,
    data: DataOf,
    algorithm: str = "fedavg",
    *,
    test: DataOf | None = None,
    coefficients: str | None = None,
    recipe: Recipe | None = None,
    head: str | None = None,
    prox: float = 0.1,
    head_epochs: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> Any:
    """Return a Flower `ClientApp` that trains as the clients of `nk.federate` do.

    Args:
        model: the network with which all clients begin, with the same weights everywhere.
        data: a function of Flower's context that returns the client's name and its arrays ``(inputs, labels)``.
        algorithm: as in `nk.federate`.
        test: the same of test data, on which accuracy is taken where the server requests it.
        coefficients: as in `nk.federate`.
        recipe: how the client trains in a round.
        head: the layer that is the head.
        prox: as in `nk.federate`.
        head_epochs: as in `nk.federate`.
        seed: from which the order of the examples follows.
        **settings: settings of the recipe.
    """
    made = import_optional("flwr.clientapp", "flower", "`client_app`").ClientApp()
    node = _Node(model, data, test, _plan(model, algorithm, coefficients, head), local_recipe(recipe, settings),
                 prox, head_epochs, seed)  # fmt: skip
    made.train()(node.train)
    if test is not None:
        made.evaluate()(node.evaluate)
    return made


def federation_strategy(
    model: nn.Module,
    algorithm: str = "fedavg",
    *,
    coefficients: str | None = None,
    head: str | None = None,
    client_fraction: float = 1.0,
    nodes: int = 2,
    evaluates: bool = False,
) -> Any:
    """Return a Flower strategy that sends and averages what travels, and names clients whose update does not count.

    ``strategy.start(grid, strategy.initial_arrays, num_rounds=...)`` begins it. `strategy.records` holds a record of
    each round, as the result of `nk.federate` does.

    Args:
        model: the network with which all clients begin.
        algorithm: as in `nk.federate`.
        coefficients: as in `nk.federate`.
        head: the layer that is the head.
        client_fraction: the share of the nodes that is drawn for each round.
        nodes: for how many nodes a round waits at least.
        evaluates: whether clients report their accuracy after each round; their app must have `test`.
    """
    base = import_optional("flwr.serverapp.strategy", "flower", "`federation_strategy`").FedAvg
    require_fraction(client_fraction)
    require_at_least(1, nodes=nodes)
    plan = _plan(model, algorithm, coefficients, head)
    # Flower counts the nodes before it waits for them: without a least number a slow start would ask too few
    least = max(1, round(client_fraction * nodes))
    options = {
        "fraction_train": client_fraction, "fraction_evaluate": client_fraction * evaluates, "min_train_nodes": least,
        "min_evaluate_nodes": least * evaluates, "min_available_nodes": nodes,
    }  # fmt: skip
    start = {name: one for name, one in state_of(model).items() if name in plan.travelling}
    return _kind(base)(start, **options)


class _Node:
    """What one client does when its app is called."""

    def __init__(
        self, model: nn.Module, data: DataOf, test: DataOf | None, plan: FederatedPlan, recipe: Recipe, prox: float,
        head_epochs: int | None, seed: int,
    ):  # fmt: skip
        self.data, self.test, self.plan, self.prox = data, test, plan, prox
        self.head_epochs, self.seed, self.base = head_epochs, seed, state_of(model)
        self.training = LocalTraining(model, recipe, "one by one")

    def train(self, message: Any, context: Any) -> Any:
        """Train on the client's own data, keep the personal weights, and send the others; or send the error."""
        name, examples = self._examples(self.data, context)
        number = int(message.content[CONFIG]["server-round"])
        work = RoundWork(
            self.training, self.plan, self.base, [(name, examples)], number, self.seed, self.prox, self.head_epochs
        )
        received = _tensors(message.content[ARRAYS], self.base)
        (sent,), (own,) = self.plan.algorithm.local(received, [self._kept(context)], work)
        if work.failed:
            return _reply(message, name, work.failed[0], {}, {})
        context.state[KEPT] = _record({key: own[key] for key in self.plan.kept})
        numbers = {"num-examples": len(examples[1]), "loss": work.losses[0], "round": number}
        return _reply(message, name, "", {key: sent[key] for key in self.plan.travelling}, numbers)

    def evaluate(self, message: Any, context: Any) -> Any:
        """Return the accuracy of the client's network on its test data."""
        assert self.test is not None
        name, (inputs, labels) = self._examples(self.test, context)
        (model,) = self.training.copies(1)
        load_state(model, self.base | _tensors(message.content[ARRAYS], self.base) | self._kept(context))
        numbers = {"num-examples": len(labels), "accuracy": accuracy(model, (inputs, labels))}
        return _reply(message, name, "", {}, numbers)

    def _examples(self, source: DataOf, context: Any) -> tuple[str, LabelledData]:
        name, data = source(context)
        return str(name), checked_clients({name: data}, None)[0][str(name)]

    def _kept(self, context: Any) -> StateDict:
        if KEPT in context.state:
            return _tensors(context.state[KEPT], self.base)
        return {name: self.base[name] for name in self.plan.kept}


@functools.cache
def _kind(base: type[Any]) -> type[Any]:
    """Return the strategy's class, made of Flower's own when that is there."""

    class FederationStrategy(base):
        """Averages the weights that travel, of the clients whose update counts."""

        def __init__(self, start: StateDict, **options: Any):
            super().__init__(**options)
            self.shared, self.initial_arrays = start, _record(start)
            self.records: list[RoundRecord] = []
            self.names: dict[int, str] = {}  # of nodes that have answered once
            self._asked: list[int] = []

        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> list[Any]:
            self.shared = _tensors(arrays, self.shared)
            messages = list(super().configure_train(server_round, arrays, config, grid))
            self._asked = [one.metadata.dst_node_id for one in messages]
            return messages

        def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
            read = [_Answer(one, self.shared) for one in replies]
            self.names |= {one.node: one.client for one in read if one.client}
            own_faults = {self.name_of(one.node): one.fault for one in read if one.fault}
            asked = sorted(map(self.name_of, self._asked))
            updates = [one.update for one in read if one.update is not None]
            good, faults = received_updates(
                updates, [one for one in asked if one not in own_faults], server_round, self.shared
            )
            counted = [one.client for one in good]
            loss = mean_loss([one.loss for one in read if one.client in counted])
            self.records.append(RoundRecord(server_round, tuple(asked), tuple(counted), own_faults | faults, loss))
            if not good:
                return None, None
            self.shared = averaged(good, self.shared)
            metrics = {"num-examples": sum(one.examples for one in good)} | ({} if loss is None else {"loss": loss})
            return _record(self.shared), _app().MetricRecord(metrics)

        def name_of(self, node: int) -> str:
            """Return a client's name, or its node's number while it has never answered."""
            return self.names.get(node, f"node {node}")

    return FederationStrategy


class _Answer:
    """What a node sent back: its client's name, and an update or what went wrong."""

    def __init__(self, message: Any, like: Mapping[str, Tensor]):
        self.node, self.client, self.fault = message.metadata.src_node_id, "", ""
        self.update: ClientUpdate | None = None
        self.loss = float("nan")
        if message.has_error():
            self.fault = f"failed: {message.error.reason or f'error {message.error.code}'}"
            return
        try:
            self._read(message.content, like)
        except Exception as fault:  # anything may come over a network
            self.fault = f"sent an answer that can't be read: {type(fault).__name__}: {fault}"

    def _read(self, content: Any, like: Mapping[str, Tensor]) -> None:
        self.client = str(content[CONFIG]["client"])
        self.fault = str(content[CONFIG].get("fault", ""))
        if self.fault:
            return
        numbers = content[METRICS]
        self.loss = float(numbers["loss"])
        weights = _tensors(content[ARRAYS], like)
        self.update = ClientUpdate(self.client, int(numbers["round"]), weights, numbers["num-examples"])


def _plan(model: nn.Module, algorithm: str, coefficients: str | None, head: str | None) -> FederatedPlan:
    found = plan_for(model, algorithm, coefficients, head)
    if found.algorithm.pretrains or coefficients == "pretrained":
        raise InvalidValue(
            "clients of a real federation do not pretrain: train the network on public data first, and give it with "
            "coefficients='fixed' or 'evolving'."
        )
    if not found.travelling:
        raise InvalidValue(f"with {algorithm!r} nothing travels, so that there is nothing to federate.")
    return found


def _app() -> Any:
    return import_optional("flwr.app", "flower", "a federation")


def _reply(message: Any, client: str, fault: str, weights: StateDict, numbers: Mapping[str, Any]) -> Any:
    flower = _app()
    content = {CONFIG: flower.ConfigRecord({"client": client} | ({"fault": fault} if fault else {}))}
    content |= {METRICS: flower.MetricRecord(dict(numbers))} if numbers else {}
    content |= {ARRAYS: _record(weights)} if weights else {}
    return flower.Message(content=flower.RecordDict(content), reply_to=message)


def _record(state: Mapping[str, Tensor]) -> Any:
    flower = _app()
    return flower.ArrayRecord({name: flower.Array(as_array(one)) for name, one in state.items()})


def _tensors(record: Any, like: Mapping[str, Tensor]) -> StateDict:
    """Return the tensors of a record, in the precision and at the place of those of the same name."""
    found = {}
    for name, one in record.items():
        tensor = torch.from_numpy(np.array(one.numpy()))
        found[name] = tensor.to(like[name].device, like[name].dtype) if name in like else tensor
    return found
