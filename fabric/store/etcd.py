"""The store in etcd, through the JSON gateway that every etcd v3 serves on its client port.

How each promise is kept:

- *Reads* are linearizable and repeated on the next endpoint until one answers.
- *Writes* are tried at another endpoint only after a refusal, or where the request was certainly not sent. A
  lost answer raises ``StoreIndefinite``: etcd may still apply the write, even after newer ones.
- *A wiped store* is noticed in three ways. Every transaction also guards the store's id. An answer from
  another cluster is an error, and so is a read with an older revision than the read before.
- *Leases* last whole seconds, at least etcd's minimum of two. The granted TTL is that in etcd's answer.

One call takes at most ``attempt_timeout_s`` per endpoint (a long list: per page).
"""

import asyncio
import math
from collections.abc import Sequence

from fabric.errors import StoreError, StoreIndefinite, StoreReplaced, StoreUnavailable
from fabric.store import etcd_http
from fabric.store.base import (
    MAX_LISTED_KEYS,
    Compare,
    KeyValue,
    Lease,
    Operation,
    Put,
    check_transaction,
    check_ttl,
    key_bytes,
    key_range,
    lease_gone,
    settle_store_id,
)
from fabric.store.etcd_http import Answer, EtcdAccess, Gateway, GatewayFailure, Json

# Keys per page of a list: a page of the largest values stays below the limit on an answer's size.
PAGE_KEYS = 16
_MISSING = Answer()  # where the lease of a request is not there


class EtcdStore:
    """A handle on the etcd cluster behind ``endpoints`` (base URLs such as ``http://host:2379``).

    Raises ConfigError where ``access`` does not fit together.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        attempt_timeout_s: float,
        access: EtcdAccess = EtcdAccess(),  # noqa: B008  (frozen)
    ) -> None:
        access.check()
        self._access = access
        self.warnings: list[str] = []
        self._endpoints = tuple(endpoints)
        self._attempt_timeout_s = attempt_timeout_s
        self._gateway: Gateway | None = None
        self._cluster_id = ""
        self._store_id = ""
        self._revision = 0

    async def connect(self) -> str:
        if self._gateway is None:
            self._cluster_id, self._store_id, self._revision = "", "", 0
            self._gateway = Gateway(
                self._endpoints, attempt_timeout_s=self._attempt_timeout_s, access=self._access
            )
        try:
            await self._look_at_endpoints(self._gateway)
            self._store_id = await settle_store_id(self)
        except BaseException:
            await self.close()
            raise
        return self._store_id

    async def get(self, key: str) -> KeyValue | None:
        entries = (await self._read({"key": key_bytes(key)})).key_values
        return entries[0] if entries else None

    async def list(self, prefix: str) -> tuple[list[KeyValue], int]:
        start, end = key_range(prefix)
        entries: list[KeyValue] = []
        revision = 0
        while True:
            answer = await self._read(etcd_http.list_request(start, end, revision, PAGE_KEYS))
            # All pages of a list show the store as it was at the read of the first page.
            revision, page = revision or answer.header.revision, answer.key_values
            entries += page
            if not answer.more or not page:
                return entries, revision
            if len(entries) > MAX_LISTED_KEYS:
                raise StoreError(
                    f"More than {MAX_LISTED_KEYS} keys start with {prefix!r}: list a longer prefix."
                )
            start = page[-1].key.encode("utf-8", "surrogateescape") + b"\0"

    async def commit(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> int | None:
        check_transaction(compares, operations)
        request = etcd_http.transaction_request(compares, operations, self._store_id)
        leases = [item.lease for item in operations if isinstance(item, Put) and item.lease]
        answer = await self._anywhere(
            "/v3/kv/txn", request, writes=True, once=True, missing_is_fine=bool(leases)
        )
        if answer is _MISSING:
            raise lease_gone(leases[0])
        if answer.succeeded:
            self._revision = max(self._revision, answer.header.revision)
            return answer.header.revision
        if self._store_id and answer.failed_store_id != self._store_id.encode():
            raise StoreReplaced(
                f"The etcd is no longer the store {self._store_id}: it was wiped or replaced, nothing was "
                "written; connect again and read everything again."
            )
        return None

    async def grant_lease(self, ttl_s: float) -> Lease:
        # etcd counts whole seconds: round up, so that the TTL is never shorter than the caller's TTL.
        request: Json = {"TTL": str(math.ceil(check_ttl(ttl_s)))}
        answer = await self._anywhere("/v3/lease/grant", request, writes=True)
        lease = Lease(answer.ID, float(answer.TTL))
        if not lease.id or lease.ttl_s <= 0:
            raise StoreError("The etcd granted a lease without an id or a TTL: check its version and health.")
        return lease

    async def keep_alive(self, lease_id: int) -> float:
        request: Json = {"ID": str(lease_id)}
        answer = await self._anywhere("/v3/lease/keepalive", request, writes=True, missing_is_fine=True)
        if answer.result.TTL <= 0:
            raise lease_gone(lease_id)
        return float(answer.result.TTL)

    async def revoke(self, lease_id: int) -> None:
        await self._anywhere("/v3/lease/revoke", {"ID": str(lease_id)}, writes=True, missing_is_fine=True)

    async def close(self) -> None:
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            await gateway.close()

    async def _look_at_endpoints(self, gateway: Gateway) -> None:
        """Check the cluster and release of every endpoint. At least one must answer, all from one cluster."""
        path = "/v3/maintenance/status"
        posts = (gateway.post(endpoint, path, {}) for endpoint in gateway.endpoints)
        answers = await asyncio.gather(*posts, return_exceptions=True)
        warnings: dict[str, None] = {}
        silent = []
        for endpoint, answer in zip(gateway.endpoints, answers, strict=True):
            if isinstance(answer, Answer):
                self._check_cluster(endpoint, answer)
                warning = etcd_http.version_warning(answer.version)
            elif isinstance(answer, GatewayFailure):
                warning = (
                    f"The endpoint {endpoint} does not tell its status ({answer.text}): make sure that it is "
                    "an etcd of version 3.4 or newer whose gRPC gateway is enabled."
                )
                silent.append(warning)
            elif isinstance(answer, StoreError):
                warning = f"The etcd endpoint {endpoint} did not answer: {answer}"
                silent.append(str(answer))
            else:
                raise answer
            if warning:
                warnings[warning] = None
        if len(silent) == len(gateway.endpoints):
            raise _unavailable(silent)
        self.warnings = [*warnings]

    async def _read(self, request: Json) -> Answer:
        floor = self._revision
        answer = await self._anywhere("/v3/kv/range", request, writes=False)
        revision = answer.header.revision
        if revision < floor:
            raise StoreReplaced(
                f"The etcd store went back from revision {floor} to {revision}: it was wiped or restored, "
                "connect again and read everything again."
            )
        self._revision = max(self._revision, revision)
        return answer

    async def _anywhere(
        self, path: str, request: Json, *, writes: bool, once: bool = False, missing_is_fine: bool = False
    ) -> Answer:
        """Send a request to one endpoint after the other, and repeat it unless it may be applied ``once``.

        Raises StoreUnavailable when no endpoint answered. With ``writes``, raises StoreIndefinite when an
        endpoint may have applied the request.
        """
        gateway = self._gateway
        if gateway is None:
            raise StoreError("The etcd store is not connected: call connect() first.")
        refusals: list[str] = []
        lost: StoreIndefinite | None = None
        what = "a transaction" if once else path
        for endpoint in gateway.in_order():
            try:
                answer = await gateway.post(endpoint, path, request, fresh=once)
            except StoreIndefinite as error:
                lost = error
                refusals.append(str(error))
            except StoreUnavailable as error:
                refusals.append(str(error))
            else:
                if not isinstance(answer, GatewayFailure):
                    return self._check_cluster(endpoint, answer)
                if answer.code == etcd_http.NOT_FOUND and missing_is_fine:
                    return _MISSING
                if answer.is_definite and not answer.is_no_leader:
                    raise StoreError(f"The etcd endpoint {endpoint} refused {what}: {answer.text}.")
                refusals.append(f"The etcd endpoint {endpoint} failed ({answer.text}).")
                if once and not answer.is_no_leader:
                    lost = StoreIndefinite(
                        f"The etcd endpoint {endpoint} failed in {what} ({answer.text}): it may or may not "
                        "have been applied, read again before going on."
                    )
            gateway.avoid(endpoint)
            if once and lost is not None:
                raise lost
        if writes and lost is not None:
            raise lost
        raise _unavailable(refusals) from lost

    def _check_cluster(self, endpoint: str, answer: Answer) -> Answer:
        cluster_id = answer.header.cluster_id[:40]
        if cluster_id and cluster_id != self._cluster_id:
            if self._cluster_id:
                raise StoreError(
                    f"The etcd endpoint {endpoint} belongs to another cluster than the one we began with: "
                    "name the members of one cluster only."
                )
            self._cluster_id = cluster_id
        return answer


def _unavailable(refusals: Sequence[str]) -> StoreUnavailable:
    return StoreUnavailable(
        f"No etcd endpoint took the request, so nothing was done; check that etcd runs and has a leader: "
        f"{' '.join(refusals)}"
    )
