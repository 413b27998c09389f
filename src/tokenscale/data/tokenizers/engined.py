"""A tokenizer whose ids come from one of several packages: the fastest that is here and exact, or the one asked for."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import read_json
from tokenscale.data.tokenizers import gate
from tokenscale.data.tokenizers.base import Texts, Tokenizer
from tokenscale.data.tokenizers.engines.engine import Engine, Unavailable

#: the engine whose ids are right by definition
REFERENCE = "tokenizers"


class EngineTokenizer(Tokenizer):
    """See `tokenizer.base.Tokenizer`. `notes` say which faster engines were passed over, and why."""

    def __init__(
        self,
        folder: Path,
        manifest: dict[str, Any],
        engines: dict[str, ModuleType],
        decode: Callable[[list[int]], str],
        asked: str = "auto",
    ):
        super().__init__(manifest)
        self.notes: list[str] = []
        self._folder, self._manifest, self._engines, self._decode = folder, manifest, engines, decode
        self.engine, self._engine = self._only(asked) if asked != "auto" else self._fastest()
        self.engine_version = self._engine.version

    def encode(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """See `tokenizer.base.Tokenizer.encode`."""
        return self._engine.encode(texts)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """See `tokenizer.base.Tokenizer.decode`."""
        return self._decode(np.asarray(ids).tolist())

    def difference(self, texts: Sequence[str]) -> dict[str, str] | None:
        """Where this engine's ids are not the reference's (see `gate.difference`); None for the reference itself."""
        if self.engine == REFERENCE:
            return None
        return gate.difference(self._engine, self._open(REFERENCE), texts)

    def _only(self, asked: str) -> tuple[str, Engine]:
        if asked not in self._engines:
            raise unknown(f"engine for tokenizers of kind {self.kind}", asked, self._engines, tokenizer=self.name)
        try:
            return asked, self._open(asked)
        except Unavailable as error:
            raise UserError(
                f"the engine {asked} cannot be used here.",
                tokenizer=self.name,
                reason=error,
                next="install it, or choose another: " + ", ".join(["auto", *self._engines]),
            ) from None

    def _fastest(self) -> tuple[str, Engine]:
        for name in self._engines:
            try:
                engine = self._open(name)
            except Unavailable as error:
                self.notes.append(f"not {name}: {error}")
                continue
            if name == REFERENCE or self._is_exact(name, engine):
                return name, engine
            self.notes.append(f"not {name} {engine.version}: its ids differ from those of {REFERENCE}")
        raise UserError(
            f"no package here can hold the tokenizer {self.name}.",
            tried="; ".join(self.notes),
            next="install tokenizers (environment.yml)",
        )

    def _is_exact(self, name: str, engine: Engine) -> bool:
        """As the tokenizer's build found it with this version; tried now where it was built with another."""
        path = self._folder / "build.json"
        known = read_json(path, "record of the tokenizer's build").get("engines", {}) if path.is_file() else {}
        if known.get(name, {}).get("version") == engine.version:
            return bool(known[name]["exact"])
        try:
            reference = self._open(REFERENCE)
        except Unavailable:
            return False
        return gate.difference(engine, reference, gate.fuzz()) is None

    def _open(self, name: str) -> Engine:
        return self._engines[name].open_engine(self._folder, self._manifest)


def compared(
    folder: Path, manifest: dict[str, Any], engines: dict[str, ModuleType], control: Sequence[str]
) -> dict[str, Any]:
    """Every engine that is here, on the hostile texts: {name: {version, exact, texts, and what differs}}.

    `control` are the tokenizer's own control tokens: their text has to stay text. For the build record.
    """
    texts = gate.fuzz(control)
    reference = engines[REFERENCE].open_engine(folder, manifest)
    found: dict[str, Any] = {REFERENCE: {"version": reference.version, "exact": True}}
    for name, module in engines.items():
        if name == REFERENCE:
            continue
        try:
            engine = module.open_engine(folder, manifest)
        except Unavailable as error:
            found[name] = {"unavailable": str(error)}
            continue
        differs = gate.difference(engine, reference, texts)
        found[name] = {"version": engine.version, "exact": differs is None, "texts": len(texts)}
        if differs:
            found[name]["first_difference"] = differs
    return found
