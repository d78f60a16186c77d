"""Create the keys of a deployment at its first start. Runs with the Python of the server's image.

    python3 make_keys.py --folder /keys              Compose: files in a volume
    python3 make_keys.py --secret headrace-keys      Kubernetes: a Secret in the namespace of the pod

Both hold `keys.yaml`, which the server reads (`--api-keys-file`), and `infer.key`, `metrics.key` and `admin.key` with one key
each for its clients. A later start keeps the keys that exist. No key is printed.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

# Name -> scopes.
KEYS = {
    "infer": ("infer", "read"),
    "metrics": ("metrics",),
    "admin": ("infer", "read", "metrics", "control", "admin"),
}
KEYS_FILE = "keys.yaml"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 30.0


def make_keys(folder: Path, group_readable: Sequence[str] = ()) -> list[str]:
    """Create the keys whose files are missing.

    Args:
        folder: for keys.yaml and the keys; it must exist.
        group_readable: names of keys that the group of the folder may read; the other files have mode 0600.

    Returns:
        Names of the keys that were created.
    """
    created = []
    for name, scopes in KEYS.items():
        file = folder / f"{name}.key"
        if file.exists():
            continue
        words = [sys.executable, "-m", "headrace", "keys", "new", name, "--file", str(folder / KEYS_FILE)]
        words += [word for scope in scopes for word in ("--scope", scope)]
        # Its other lines say that the key is not shown again; here it is kept in a file.
        done = subprocess.run(words, capture_output=True)
        if done.returncode != 0:
            raise OSError(f"{' '.join(words)}: {done.stderr.decode(errors='replace').strip()}")
        # Complete or not there: a start that is interrupted here leaves only the hash of a key that was never used.
        partial = folder / f".{name}.key"
        partial.unlink(missing_ok=True)
        mode = 0o640 if name in group_readable else 0o600
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(done.stdout)
        partial.rename(file)
        created.append(name)
    return created


def create_secret(name: str, api: str, account: Path) -> bool:
    """Create the Secret with keys.yaml and the keys; returns False if it exists.

    Args:
        name: of the Secret.
        api: URL of the Kubernetes API.
        account: folder with token, ca.crt and namespace of a service account that may create Secrets.

    Raises:
        OSError: the API cannot be reached or refuses; the text has its answer.
    """
    namespace = (account / "namespace").read_text().strip()
    with tempfile.TemporaryDirectory() as scratch:
        make_keys(Path(scratch))
        files = {path.name: path.read_bytes() for path in Path(scratch).iterdir() if not path.name.startswith(".")}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": {"app": "headrace"}},
        "type": "Opaque",
        "data": {file: base64.b64encode(content).decode() for file, content in files.items()},
    }
    request = urllib.request.Request(
        f"{api}/api/v1/namespaces/{namespace}/secrets",
        json.dumps(secret).encode(),
        {"Authorization": f"Bearer {(account / 'token').read_text().strip()}", "Content-Type": "application/json"},
    )
    context = ssl.create_default_context(cafile=str(account / "ca.crt"))
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context):
            return True
    except urllib.error.HTTPError as error:
        if error.code == 409:
            return False
        raise OSError(
            f"the Kubernetes API answered {error.code}: {error.read(1000).decode(errors='replace')}"
        ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Create the keys and say where they are."""
    parser = argparse.ArgumentParser(description="Create the keys of a deployment, if there are none.")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--folder", type=Path, help="folder for the files")
    target.add_argument("--secret", help="name of the Secret")
    parser.add_argument("--group-readable", action="append", default=[], choices=list(KEYS), help="key of mode 0640")
    parser.add_argument("--service-account", type=Path, default=SERVICE_ACCOUNT, help="(%(default)s)")
    options = parser.parse_args(arguments)
    if options.folder is not None:
        created = make_keys(options.folder, options.group_readable)
        print(f"created keys: {', '.join(created)}" if created else "kept the keys that exist")
        print(f"{options.folder}: {KEYS_FILE} for the server, {', '.join(f'{name}.key' for name in KEYS)} for clients")
        return 0
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    api = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    is_new = create_secret(options.secret, api, options.service_account)
    print(f"the Secret {options.secret} {'was created' if is_new else 'exists and is kept'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
