"""Checks of what a recipe reads and connects to: model, data, hub, retriever, wandb."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sg_rlhf.doctor.check import FAILED, OK, SKIPPED, WARNING, Check
from sg_rlhf.doctor.facts import CACHE, FOLDER, NOBODY, RETRIEVER, STRANGER, UNTRUSTED

if TYPE_CHECKING:
    from sg_rlhf.doctor.facts import Facts
    from sg_rlhf.doctor.needs import Needs


def checks(facts: Facts, needs: Needs) -> list[Check]:
    """The checks for a recipe; only the hub without one."""
    if not needs.recipe:
        return [hub(facts)]
    found = [
        cluster(facts, needs),
        model(facts, needs),
        data(facts, needs),
        retriever(facts, needs),
        wandb(facts),
    ]
    return [check for check in found if check]


def cluster(facts: Facts, needs: Needs) -> Check | None:
    """A recipe for several nodes needs a Ray cluster. The other checks are for one node."""
    if needs.nodes < 2 or facts.ray_address:
        return None
    remedy = (
        "`ray start --head` on one, `ray start --address=` on the others, then `ray job submit`"
    )
    return Check("cluster", WARNING, "no RAY_ADDRESS", f"{needs.nodes} nodes", remedy)


def _out_of_reach(facts: Facts) -> tuple[str, str] | None:
    """(problem, remedy) if the hub cannot be used; None if it can or if that is unknown."""
    if facts.hub is None or (facts.hub.reachable is None and not facts.hub.offline):
        return None
    if facts.hub.offline:
        return "the hub is off (HF_HUB_OFFLINE)", "unset it"
    if not facts.hub.reachable:
        return f"no answer from {facts.hub.host}", "set HF_ENDPOINT to a mirror, or https_proxy"
    return None


def hub(facts: Facts) -> Check:
    """The hub, the source of models and data sets that are not on this machine."""
    needed = "models, data sets"
    problem = _out_of_reach(facts)
    if problem:
        # Only a remark: a recipe's files have their own checks.
        found, remedy = problem
        remark = f"for missing models: {remedy}, or give folders instead of ids"
        return Check("hub", OK, found, needed, remark=remark)
    if facts.hub is None or facts.hub.reachable is None:
        return Check("hub", SKIPPED, "unknown", needed)
    token = "with a token" if facts.hub.token else "without a token, which gated models need"
    return Check("hub", OK, f"{facts.hub.host} answers", needed, remark=token)


def model(facts: Facts, needs: Needs) -> Check | None:
    """The model: on this machine, or available from the hub."""
    if not needs.model:
        return None
    place, needed = facts.models.get(needs.model), needs.model
    is_id = not needs.model.startswith((".", "/")) and needs.model.count("/") == 1
    if place is None and not is_id:
        return Check("model", SKIPPED, "unknown", needed)
    if place in (FOLDER, CACHE):
        found = "in the hub's cache" if place == CACHE else "a local folder"
        return Check("model", OK, found, needed)
    if not is_id:
        remedy = "a folder with config.json and weights, or an id of the hub"
        return Check("model", FAILED, "no model folder there", needed, remedy)
    problem = _out_of_reach(facts)
    if problem:
        found, remedy = problem
        remedy = f"{remedy}, or actor.model_name_or_path=FOLDER"
        return Check("model", FAILED, f"not here, and {found}", needed, remedy)
    if facts.hub is None or facts.hub.reachable is None:
        return Check("model", SKIPPED, "not on this machine; the hub was not queried", needed)
    if needs.gated and facts.hub.token is False:
        remedy = f"accept its licence at {facts.hub.host}/{needs.model}, then HF_TOKEN=..."
        return Check("model", FAILED, "gated, and no token here", needed, remedy)
    size = f", {needs.model_gb:.0f} GB" if needs.model_gb else ""
    return Check("model", OK, f"not here: a download{size}", needed)


def data(facts: Facts, needs: Needs) -> Check | None:
    """Data files of the recipe. The training scripts make them."""
    if not needs.data:
        return None
    known = [name for name in needs.data if name in facts.data]
    needed = ", ".join(needs.data)
    if not known:
        return Check("data", SKIPPED, "unknown", needed)
    missing = [name for name in known if not facts.data[name]]
    if not missing:
        return Check("data", OK, "there", needed)
    remedy = "make it with `sg-rlhf data`; examples/scripts/*.sh do it themselves"
    return Check("data", WARNING, f"no {', '.join(missing)}", needed, remedy)


def retriever(facts: Facts, needs: Needs) -> Check | None:
    """The retriever at sg.search.url, for a recipe that searches."""
    if not needs.retriever:
        return None
    needed = f"a retriever at {needs.retriever}"
    if facts.retriever == RETRIEVER:
        return Check("retriever", OK, "it answers", needed)
    if facts.retriever == STRANGER:
        remedy = "end that, or choose another port: SG_PORT, sg.search.url"
        return Check("retriever", FAILED, "something else listens there", needed, remedy)
    if facts.retriever == UNTRUSTED:
        remedy = "SSL_CERT_FILE=FILE names the authority that signed it"
        return Check("retriever", FAILED, "its certificate is not trusted", needed, remedy)
    if facts.retriever == NOBODY:
        remedy = "`sg-rlhf serve --index DIR`; examples/scripts/train_grpo_sg_search.sh starts one"
        return Check("retriever", WARNING, "nobody listens there", needed, remedy)
    return Check("retriever", SKIPPED, "unknown", needed)


def wandb(facts: Facts) -> Check | None:
    """wandb, only if it is configured: without a key a run logs offline."""
    if facts.wandb == "key":
        return Check("wandb", OK, "a key: the run is logged online")
    if facts.wandb == "offline":
        return Check("wandb", OK, "offline by WANDB_MODE")
    if facts.wandb == "netrc":
        remark = "a run is logged online with WANDB_API_KEY or logger.wandb.key alone"
        return Check("wandb", OK, "a login in netrc", remark=remark)
    return None
