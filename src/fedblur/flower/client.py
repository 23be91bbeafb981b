"""The ClientApp: `client_update` on a real node, and the node's side of the secure sum.

Every question is answered at most once, and only in the trust model that the run and the node agree on. Whatever goes
wrong stays on the node: the server learns that the node said no, never why. Torch is imported where a model is trained,
since Flower starts a process for every message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from logging import WARNING
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from fedblur.core.errors import FedBlurError
from fedblur.flower import masking, wire
from fedblur.flower.secure_sum_client import Member, demand, numbers
from fedblur.flower.settings import Deployment, demand_trust, min_cohort

_MEMBER, _ROUNDS = "fedblur.member", "fedblur.rounds"  # what a node remembers, on the node
Said = tuple[Mapping[str, Any], Mapping[str, bytes]]  # values and arrays of a reply


class Question:
    """A question that has been read, and what the node remembers of earlier ones."""

    def __init__(self, kind: str, message: Message, context: Context) -> None:
        self.kind, self.context = kind, context
        self.values, self.arrays = wire.read(message.content, wire.QUESTIONS[kind])
        self.round_, self.nonce = self.values["round"], self.values["nonce"]
        self.run = context.run_id

    def open_round(self) -> int:
        """Refuse a round that was answered before: rounds only go forward. Return the one before it, 0 for none."""
        memory = self.context.state.config_records
        last = memory[_ROUNDS]["last"] if _ROUNDS in memory else 0
        if not isinstance(last, int) or self.round_ <= last:
            raise wire.Refused(f"round {self.round_} was answered, or is over")
        memory[_ROUNDS] = ConfigRecord({"last": self.round_})
        return last

    def member(self) -> Member:
        memory = self.context.state.config_records
        demand(_MEMBER in memory, "there was no question for keys before")
        member = Member.load(memory[_MEMBER])
        demand(member.round_ == self.round_ and member.run == self.run, "the question is of another round")
        return member

    def remember(self, member: Member) -> None:
        self.context.state.config_records[_MEMBER] = ConfigRecord(member.save())


def client_app(deployment: Deployment) -> ClientApp:
    """Return the app that nodes run."""
    app = ClientApp()
    for kind, (trust, answer) in _ANSWERS.items():
        app.train(kind)(_guarded(kind, trust, answer, deployment))
    return app


def _guarded(
    kind: str, trust: str, answer: Callable[[Deployment, Question], Said], deployment: Deployment
) -> Callable[[Message, Context], Message]:
    def handle(message: Message, context: Context) -> Message:
        round_, nonce = 0, b""
        try:
            question = Question(kind, message, context)
            round_, nonce = question.round_, question.nonce
            demand(demand_trust(context.run_config, context.node_config) == trust, f"{kind} is not of this trust model")
            values, arrays = answer(deployment, question)
            content = wire.build(wire.REPLIES[kind], round_, nonce, values, arrays)
        except Exception as error:  # its text may hold data: it stays here
            ours = isinstance(error, FedBlurError | wire.Refused)
            log(WARNING, "%s of round %d: %s", kind, round_, error if ours else type(error).__name__, exc_info=not ours)
            content = wire.refusal(round_, nonce)
        return Message(content, reply_to=message)

    return handle


def _update(deployment: Deployment, question: Question) -> Said:
    """Return the clipped update, for a server that is trusted with it (`central`)."""
    from fedblur.flower import node_training

    last, node = question.open_round(), question.context.node_config
    node_training.demand_distance(deployment, question.round_, last)
    told, arrays = question.values, question.arrays
    update = node_training.update(deployment, node, question.context.node_id, question.round_, told, arrays)
    return {}, {"update": update}


def _keys(deployment: Deployment, question: Question) -> Said:
    question.open_round()
    member = Member.begin(question.run, question.round_, min_cohort(deployment.config))
    question.remember(member)
    return {"mask": member.mask_public, "seal": member.seal_public}, {}


def _shares(deployment: Deployment, question: Question) -> Said:
    told = question.values
    member, said = question.member().deal(
        told["number"], numbers(told["members"]), told["mask_publics"], told["seal_publics"]
    )
    question.remember(member)
    return said, {}


def _masked(deployment: Deployment, question: Question) -> Said:
    """Return the update with its share of the noise, under masks (`secure-sum`)."""
    from fedblur.flower import node_training

    told, node = question.values, question.context.node_config
    member = question.member().receive(numbers(told["dealers"]), told["sealed"])
    vector, bits = node_training.noisy(
        deployment, node, question.context.node_id, question.round_, told, question.arrays, member.number
    )
    member, masked = member.mask(vector, bits)
    question.remember(member)
    return {}, {"masked": masking.pack(masked, bits)}


def _unmask(deployment: Deployment, question: Question) -> Said:
    told = question.values
    member, said = question.member().unmask(numbers(told["alive"]), numbers(told["dropped"]))
    question.remember(member)
    return said, {}


_ANSWERS: dict[str, tuple[str, Callable[[Deployment, Question], Said]]] = {
    "update": ("central", _update),
    "keys": ("secure-sum", _keys),
    "shares": ("secure-sum", _shares),
    "masked": ("secure-sum", _masked),
    "unmask": ("secure-sum", _unmask),
}
