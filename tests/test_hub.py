"""Hub ids through the real client, against a Hub on this machine."""

import hashlib
import http.server
import json
import threading
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants as constants
import pytest

from convert import from_torch
from eagle3_jax import hub
from eagle3_jax.files.source import FileError

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "weights/d/0": b"of a converted draft",
    "README.md": b"not wanted",
    "pytorch_model.bin": b"not wanted",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """One model, `org/name`; `org/gated` is forbidden, nothing else exists."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        resolve = f"/org/name/resolve/{SHA}/"
        if path in ("/api/models/org/name", "/api/models/org/name/revision/main"):
            siblings = [{"rfilename": name} for name in FILES]
            model = {"id": "org/name", "modelId": "org/name", "sha": SHA, "siblings": siblings}
            self.answer(200, json.dumps(model | {"tags": [], "downloads": 0}).encode())
        elif path.startswith(f"/api/models/org/name/tree/{SHA}"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in FILES.items()
            ]
            self.answer(200, json.dumps(tree).encode())
        elif path.startswith(resolve):
            data = FILES[path.removeprefix(resolve)]
            tag = hashlib.sha1(data).hexdigest()
            self.answer(200, data, ETag=f'"{tag}"', **{"X-Repo-Commit": SHA})
        elif "/org/gated" in path:
            self.answer(403, b"{}", **{"X-Error-Code": "GatedRepo"})
        else:
            self.answer(404, b"{}", **{"X-Error-Code": "RepoNotFound"})

    def answer(self, status: int, data: bytes, **headers: str):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object):
        pass


@pytest.fixture
def served(monkeypatch, tmp_path):
    """The address of a running Hub; an empty cache."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    use(monkeypatch, address, tmp_path / "cache")
    yield address
    server.shutdown()
    thread.join()
    server.server_close()


def use(monkeypatch, address: str, cache: Path):
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


def test_only_config_weights_and_tokenizer_come(served):
    folder = hub.model_folder("org/name")
    wanted = {k: v for k, v in FILES.items() if v != b"not wanted"}
    files = (f for f in folder.rglob("*") if f.is_file())
    assert {str(f.relative_to(folder)): f.read_bytes() for f in files} == wanted


def test_what_is_on_disk_serves_without_a_connection(served, monkeypatch, tmp_path):
    folder = hub.model_folder("org/name")
    use(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    assert hub.model_folder("org/name").samefile(folder)
    with pytest.raises(FileError, match=r"org/other: no such folder, and the Hub cannot give it: "):
        hub.model_folder("org/other")


@pytest.mark.parametrize(("name", "status"), [("org/none", 404), ("org/gated", 403)])
def test_what_the_hub_refuses(served, name, status):
    with pytest.raises(FileError) as caught:
        hub.model_folder(name)
    assert str(caught.value) == (
        f"{name}: no such folder, and the Hub cannot give it: not on the Hub, or not open to you "
        f"(HTTP {status})"
    )


@pytest.mark.parametrize("name", ["model", "./org/name", "a/b/c", "/org/name", "org/", "../name"])
def test_a_path_is_never_asked_of_the_hub(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", None)
    with pytest.raises(FileError, match=r": no such folder$"):
        hub.model_folder(name)


def test_a_folder_wins_over_an_id(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", None)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub.model_folder("org/name") == Path("org/name")
    (tmp_path / "org" / "file").write_text("")
    with pytest.raises(FileError, match="org/file: not a folder"):
        hub.model_folder("org/file")


def test_a_draft_by_its_id(served, tmp_path, capsys):
    """Its config, weights in either format and vocabulary map; of the target the config alone."""
    folder = hub.local_path(Path("org/name"), hub.DRAFT_PATTERNS)
    found = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    assert found == {"config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin"}
    here = tmp_path / "nothing" / "here"
    assert hub.local_path(here, hub.DRAFT_PATTERNS) == here
    status = from_torch.main(["org/none", "--out", str(tmp_path / "out")])
    assert status == 2
    assert "error [FILE]: org/none: no such folder, and the Hub cannot" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
