"""Keys of a request's blocks: kvtier's own chain, never the engine's hashes.

Rules:
1. Hashed once a request, at the smallest block of any group, and extended as tokens come.
2. The chain starts from the namespace, the cache salt and the adapter: no adapter, no salt: the plain chain.
   An adapter is its name, its path and the digest of its files. Its number is no identity: it is reused.
3. A unit that media or prompt embeddings reach into is bound to them: whole identifier, position, length.
4. A request that cannot be keyed safely has no keys, and takes part in nothing.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.core.groups import Group
from kvtier.core.ids import Key
from kvtier.core.prefix import Chain, chain_start, joined
from kvtier.vllm.digests import DigestCache, signature, weight_files

log = logging.getLogger("kvtier")


class Keyring:
    """Makes the keys of requests. `reset` begins a new namespace, in O(1)."""

    def __init__(self, namespace: bytes, groups: Sequence[Group], unit_tokens: int) -> None:
        self.groups = list(groups)
        self.unit_tokens = unit_tokens
        self.epoch = 0
        self._namespace = namespace
        self._nonce = b""
        self._adapters = Adapters()

    def reset(self) -> None:
        """Keys made from now on never equal earlier ones, of this engine or any other."""
        self.epoch += 1
        self._nonce = secrets.token_bytes(16)

    def keys_of(self, request: Any) -> RequestKeys | None:
        """The keys of a request, none hashed yet; None if it cannot be keyed safely."""
        if request.prompt_token_ids is None or request.resumable:
            # Embeddings without ids would all look like the same tokens; a session's prompt is changed later.
            return None
        if request.prompt_embeds is not None and request.prompt_is_token_ids is None:
            return None
        if any(not feature.identifier for feature in request.mm_features):
            return None
        adapter = b""
        if request.lora_request is not None:
            found = self._adapters.identity(request.lora_request)
            if found is None:
                return None
            adapter = found
        # Always both fields: a salt can never look like a salt with an adapter behind it.
        salt = joined((request.cache_salt or "").encode(), adapter)
        start = chain_start(self._namespace + self._nonce, salt)
        return RequestKeys(request, Chain(start, self.unit_tokens), self.groups, self.epoch)


class RequestKeys:
    """One request's chain and the keys of each group's full blocks."""

    __slots__ = ("_chain", "_groups", "_keys", "_media", "_request", "epoch")

    def __init__(self, request: Any, chain: Chain, groups: Sequence[Group], epoch: int) -> None:
        self.epoch = epoch
        self._request = request
        self._chain = chain
        self._groups = groups
        self._keys: list[list[Key]] = [[] for _ in groups]
        self._media = sorted(
            (f.mm_position.offset, f.mm_position.length, str(f.modality), str(f.identifier))
            for f in request.mm_features
        )

    def upto(self, tokens: int) -> list[list[Key]]:
        """For each group the keys of its blocks, at least of those that end within the first `tokens`.

        The lists are the request's own and grow; take a slice of what is needed.
        """
        chain, unit = self._chain, self._chain.unit_tokens
        done = len(chain.digests) * unit
        end = tokens - tokens % unit
        if end > done:
            extras = None
            if self._media or self._request.prompt_embeds is not None:
                extras = [self._extra(first, first + unit) for first in range(done, end, unit)]
            # Four times as fast as numpy from a list.
            chain.extend(array("I", self._request.all_token_ids[done:end]), extras)
            for number, (group, keys) in enumerate(zip(self._groups, self._keys, strict=True)):
                keys.extend(chain.keys(number, group.block_tokens // unit, len(keys)))
        return self._keys

    def _extra(self, first: int, end: int) -> bytes:
        """What binds the unit of tokens [first, end) beyond its tokens; empty if nothing does."""
        fields: list[bytes] = []
        for offset, length, modality, identifier in self._media:
            if offset < end and first < offset + length:
                fields += [b"media", modality.encode(), identifier.encode()]
                fields += [number.to_bytes(8, "little", signed=True) for number in (offset - first, length)]
        embeds = self._request.prompt_embeds
        if embeds is not None and first < len(embeds):
            mask = bytes(self._request.prompt_is_token_ids[first:end])
            fields += [b"embeds", _digest(embeds[first:end]), mask]
        return joined(*fields) if fields else b""


class Adapters:
    """Identities of LoRA adapters, found from their files when first seen."""

    def __init__(self, digests: DigestCache | None = None) -> None:
        self._digests = digests or DigestCache()
        self._seen: dict[tuple[int, str, str], tuple[Any, bytes | None]] = {}

    def identity(self, lora: Any) -> bytes | None:
        """None where files and loaded weights may differ: files that are not here, or changed after they were seen.

        The engine does not read changed files again under the same number, or only if it had dropped them.
        """
        name, path = str(lora.lora_name), str(lora.lora_path)
        at = (int(lora.lora_int_id), name, path)
        if at not in self._seen:
            self._seen[at] = self._find(name, path)
        sign, identity = self._seen[at]
        if identity is not None and self._sign(path) != sign:
            log.warning("adapter '%s': its files in %s changed; its requests are not cached any more", name, path)
            self._seen[at] = (None, None)
            return None
        return identity

    def _find(self, name: str, path: str) -> tuple[Any, bytes | None]:
        sign = self._sign(path)
        try:
            files = weight_files(Path(path)) if sign else []
            digest = self._digests.of_files(files) if files else ""
        except OSError:
            digest = ""
        if not digest or self._sign(path) != sign:
            log.warning("adapter '%s': no files in '%s' to know it by; its requests are not cached", name, path)
            return None, None
        return sign, joined(b"lora", name.encode(), path.encode(), digest.encode())

    def _sign(self, path: str) -> Any:
        try:
            return signature(weight_files(Path(path)))
        except OSError:
            return None


def _digest(tensor: Any) -> bytes:
    """Digest of a tensor's type, shape and bytes."""
    import torch

    rows = tensor.detach().cpu().contiguous()
    head = f"{rows.dtype} {tuple(rows.shape)}".encode()
    return hashlib.sha256(joined(head) + rows.view(torch.uint8).numpy().tobytes()).digest()
