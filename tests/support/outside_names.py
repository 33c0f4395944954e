"""Every text field of a message and of an HTTP body with its kind, and samples with a hostile text in one of them.

A field without a kind is text: it is shown, compared, or given to a policy or to a subject. A kind says who resolves
the field: `inside` a sandbox, any other on a host, where it may name code, a file or an address.
"""

from collections.abc import Iterator
from typing import Any

from msgspec import Struct, inspect

from headrace.messages import TYPES
from headrace.messages.base import Array, Message
from tests.support.mutations import GROUP

TABLE = """
Event: actor id run kind text data
Heartbeat: actor id node run status waits
Metric: actor id run values
DeadLetter: stream consumer subject type reason headers trace command
DeadLetterSettled: stream consumer note
Rejected: stream consumer subject reason headers
Advisory: stream consumer reason
BlobRef: sha256=blob type encoding node=node check expiry
Ping: note
Ack: detail code
Plugin: seam=plugin name=plugin version source
TaskRef: suite=suite task=task
Task: family prompt files=inside allowed=inside network=place template=image image=image repository=inside
  tools=tool system lint=inside web_search=inside
TestPlan: paths=inside argv=inside prepare=inside
Step: prompt files=inside
Oracle: hidden=inside expected sealed=inside answers solution=inside removed=inside script answer left_out
Grading: pass_to_pass parser=parser file=inside checker=checker reference=checker
CheatRule: name pattern
Criterion: id text
Verifier: image=image
Artifact: path=inside exclude=inside
StepTests: name hidden=inside solution=inside script allowed=inside min_reward
Acquire: run lane group template=image workdir=inside hostname=host network=place requires files=inside
  harness=harness
Acquired: node sandbox secret backend=backend capabilities machine digest
SandboxCall: sandbox secret call_id
Exec: argv=inside cwd=inside env=inside user=inside
ReadFile: path=inside
WriteFiles: files=inside delete=inside
ReplaceLines: path=inside text
ListFiles: pattern=inside
Search: pattern=inside glob=inside
PullTree: patterns=inside
Cancel: call_id
StartJob: argv=inside cwd=inside env=inside user=inside
PushTar: path=inside
PullTar: path=inside
Change: path=inside target=inside
ApplyChanges: files=inside
OpResult: error stdout stderr files digest originals tampered
TestOutcome: name message observed
SandboxReply: failure detail
Renew: sandbox secret
Release: sandbox secret
Fork: sandbox secret
ReleaseGroup: run lane group
ToolLog: node sandbox run lane group call_id op brief
SearchRequest: run template=file base files=inside deleted=inside query model
SearchReply: node root model failure detail
Hit: path lines chunk
Array: dtype
Mounted: folder=inside runners=inside
RolloutRequest: run group=id prompt files=inside harness=harness
PolicyRef: name=script run=run
Workspace: name=id node=node
TurnSampled: run trajectory=id node=node sandbox fingerprint
ToolCall: id name=tool arguments=inside error wire_id alias
ToolResult: call_id output
Retrieved: root model chunks
TurnDone: run trajectory
Turn: caller
HarnessEnd: name said
Snapshot: diff=inside deleted=inside originals=inside touched=inside
Trajectory: run group id=id family diff=inside deleted=inside originals=inside touched=inside digest_before machine
  digest_after fingerprint renderer=hash backend=backend rollout
Capture: untrainable labels
SlotFailed: run group reason detail rollout
RendererBundle: renderer=renderer tokenizer_json chat_template=template template_kwargs special_tokens generation
  system date tools plugin
RendererRecord: run sha256=hash
EvalRequest: id run suite=suite ids=task reason harnesses=harness
EvalResult: id run suite=suite passes families reason
Score: run group family judge_version parts suspicions reason content certificate
StepScore: name reason
RubricScore: rubric digest model model_hash
CriterionScore: id reason
Certificate: task_hash judge_version backend=backend reasons noop stub survivors notes leaks risks output
CertifyAsked: run task_hash
SlotIssued: run group=id
GroupClosed: run group dropped_slots
GroupDropped: run group detail
StalenessBound: run
BoundAsked: run
Fence: run actor id
TrainerOrder: run settings
Admission: run
Agent: id=id user tenant image=image files=inside webhook=url webhook_secret set_id prepared_node prepared_sandbox
AgentRun: id prompt detail changed node sandbox added check_output
AgentSet: id user tenant agents files=inside check=inside setup=inside node sandboxes
WorkspaceCommand: run name image=image files=inside command=inside copies
WorkspaceReport: output files node sandboxes failed
PurgeUser: user
ReadmitUser: user
ApiKey: id digest tenant
AskFate: trajectory
UserDropped: user actor
SealedSecret: boxes
DeniedUser: run user
PurgeCertificate: statement signature public_key detail
Feedback: tenant user run trajectory comment untrainable
FeedbackSettled: run detail branch group
FeedbackPurged: run user branch
PurgedFeedback: group
ClientGroup: run group sessions
Branch: run base_run=run base_hash
ShadowTurn: run detail
GateState: run evaluations
GateVerdict: run reason
AttemptControl: run group workspace user turn
Traffic: region run server gateway
CapacityLease: rollout lanes reason
Promotion: run eval_id reason branch=run
ClientTurn: run group id forced stops answer
TurnPlace: group
TokenLogprob: text
ClientMessage: text call_id
ClientCall: id name arguments
ClientTool: name description parameters
ClientTurnPart: thinking text
ClientTurnDone: text refused failed thinking after stopped_by
ClientSessionEnd: run group tenant untrainable labels
ClientSession: group tenant key named untrainable labels
RecordedTurn: history asked retry tools
RankLayout: backend torch nccl nccl_algo nccl_proto
RecordsPurged: run
StepManifest: run base_hash code fingerprint objective ordered
BatchGroup: group
TokenGaps: run
TokenGap: trajectory engine
StepDone: state_hash staleness alarm run groups metrics
EngineMismatch: engine fingerprint
Efficiency: seconds
StepFailed: run state_hash groups reason detail command
LeftOut: reason detail
SnapshotReady: run path=path state_hash=hash
WeightChunk: run
WeightManifest: run state_hash=hash base_hash parent precision source_hash signer
TensorInfo: name dtype
ChunkInfo: sha256
WeightHead: run state_hash=hash source_hash signer
WeightsStaged: run node region path=path state_hash=hash
WeightsSwapped: run rollout node state_hash
NewSession: user suite=suite task=task group metadata prompt files=inside
NewRating: comment
NewAgent: prompt user setup=inside check=inside
WorkspaceSource: files=inside image=image
GitSource: url=url ref=reference
Webhook: url=url secret
Merge: agent onto_agent
NewRun: prompt
LaterFiles: files=inside
"""
KINDS = {
    "suite": "headrace.tasks.open_suite",
    "task": "the suite; a folder's id becomes a file's name",
    "tool": "the registry of tools",
    "checker": "the registry of checkers, and the worker of verifiers",
    "parser": "the table of judging.logs",
    "renderer": "the registry of renderers",
    "template": "jinja's sandboxed environment",
    "script": "the table of scripted policies",
    "run": "subjects, and the folder of a branch",
    "image": "the node's image store and templates",
    "place": "the sandbox's proxy",
    "host": "the sandbox's host name",
    "url": "an HTTP client or git",
    "reference": "git",
    "path": "a file of the weights",
    "blob": "claim checks and the node's folder of payloads",
    "file": "the file of a template's vectors",
    "hash": "files of the weights, compared with computed hashes",
    "id": "subjects and keys",
    "node": "subjects and keys",
    "backend": "the registry of sandbox backends",
    "harness": "the harnesses of the node's configuration",
    "plugin": "compared with this node's plugins",
    "inside": "a sandbox",
}
FIRST = {"TaskRef.suite": "generated/train", "TaskRef.task": "0", "EvalRequest.suite": "generated/heldout"}
"""Values with which a reader goes on to the field after."""


def table() -> dict[str, str]:
    """``Struct.field`` to its kind; empty for text."""
    kinds: dict[str, str] = {}
    struct = ""
    for line in TABLE.strip().splitlines():
        name, colon, rest = line.partition(":")
        struct, rest = (name, rest) if colon else (struct, line)
        for field in rest.split():
            field, _, kind = field.partition("=")
            kinds[f"{struct}.{field}"] = kind
    return kinds


def text_fields(structs: Iterator[type[Struct]]) -> set[str]:
    """``Struct.field`` of each field that holds a text, in these structs and in all within them."""
    named: set[str] = set()
    done: set[type] = set()

    def walk(kind: inspect.Type, owner: str) -> None:
        match kind:
            case inspect.Metadata(type=inner):
                walk(inner, owner)
            case inspect.StrType() | inspect.AnyType() | inspect.CustomType():
                named.add(owner)
            case inspect.UnionType(types=types) | inspect.TupleType(item_types=types):
                for each in types:
                    walk(each, owner)
            case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
                walk(item, owner)
            case inspect.DictType(key_type=key, value_type=value):
                walk(key, owner)
                walk(value, owner)
            case inspect.StructType(cls=cls, fields=fields) if cls not in done:
                done.add(cls)
                for field in fields:
                    walk(field.type, f"{cls.__name__}.{field.name}")

    for struct in structs:
        walk(inspect.type_info(struct), "")
    return named


def sample(cls: type[Struct], run: str, target: str = "", text: str = "") -> dict[str, Any]:
    """The fields of a message or a body, with `text` wherever the field `target` stands."""
    made: dict[str, Any] = _value(inspect.type_info(cls), "", target, text)
    ours = {"run": run, "group": GROUP, "trajectory": f"{GROUP}-0-0", "id": f"{GROUP}-0-0", "lane": "train"}
    mine = {name: value for name, value in ours.items() if name in made and target != f"{cls.__name__}.{name}"}
    return made | mine if issubclass(cls, Message) else made


def targets(cls: type[Struct]) -> list[str]:
    """The fields in a struct that a host resolves."""
    kinds = table()
    return sorted(name for name in text_fields(iter((cls,))) if kinds.get(name) not in ("", "inside", None))


def _value(kind: inspect.Type, owner: str, target: str, text: str) -> Any:
    match kind:
        case inspect.Metadata(type=inner):
            return _value(inner, owner, target, text)
        case inspect.StructType(cls=cls, fields=fields):
            if cls is Array:
                return {"dtype": "<i4", "shape": [1], "data": b"\x01\0\0\0"}
            tag = {kind.tag_field: kind.tag} if kind.tag_field else {}
            made = {
                field.encode_name: _value(field.type, f"{cls.__name__}.{field.name}", target, text) for field in fields
            }
            if cls.__name__ == "PolicyRef":
                made["kind"] = "pinned" if target == "PolicyRef.run" else "scripted"
                made |= {} if target == "PolicyRef.name" else {"name": "idle"}
                made |= {} if target == "PolicyRef.run" else {"run": ""}
            return made | tag
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.UnionType(types=types):
            return _value(next((each for each in types if _holds(each, target)), types[0]), owner, target, text)
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return [_value(item, owner, target, text)]
        case inspect.TupleType(item_types=items):
            return [_value(item, owner, target, text) for item in items]
        case inspect.DictType(key_type=key, value_type=value):
            return {_value(key, owner, target, text): _value(value, owner, target, text)}
        case inspect.StrType(pattern=pattern):
            if owner == target:
                return text
            return FIRST.get(owner, "0" * 64 if pattern and "0-9a-f]{32" in pattern else "x1")
        case inspect.BytesType():
            return b"\0"
        case inspect.BoolType():
            return False
        case inspect.IntType() | inspect.FloatType():
            return 1
        case inspect.AnyType() | inspect.CustomType():
            return text if owner == target else "x1"
    raise TypeError(f"no sample for {kind}")


def _holds(kind: inspect.Type, target: str) -> bool:
    return isinstance(kind, inspect.StructType) and target in text_fields(iter((kind.cls,)))


def readable() -> Iterator[type[Message]]:
    """All message types."""
    yield from (cls for _, cls in sorted(TYPES.items()))
