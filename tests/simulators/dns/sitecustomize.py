"""The cluster's DNS inside a simulated pod: Python imports this file at start, before anything else.

The kubelet keeps all names in a JSON file (`SIMULATED_DNS`), and they are looked up through the search list
that a real pod has. What is of no zone of the cluster goes to the system's resolver. Only look-ups of Python
itself see it: a library in C that is given a name asks the system.
"""

from __future__ import annotations

import os


def _install(file: str, namespace: str) -> None:
    import _socket  # before `socket`, which copies its functions

    resolve, resolve_one = _socket.getaddrinfo, _socket.gethostbyname
    search = ("", f".{namespace}.svc.cluster.local", ".svc.cluster.local", ".cluster.local")

    def look_up(host: object) -> list[str]:
        import json

        name = host.decode() if isinstance(host, bytes) else host
        if not isinstance(name, str) or "." not in name or name.replace(".", "").isdigit():
            return []
        try:
            with open(file) as opened:
                records = json.load(opened)
        except (OSError, ValueError):
            return []
        full_names = [name[:-1]] if name.endswith(".") else [name + domain for domain in search]
        for full_name in full_names:
            if found := records["names"].get(full_name):
                return found
        if any(full_name.partition(".")[2] in records["zones"] for full_name in full_names):
            raise _socket.gaierror(_socket.EAI_NONAME, "Name or service not known")
        return []

    def getaddrinfo(host, port, *args, **options):
        found = look_up(host)
        if not found:
            return resolve(host, port, *args, **options)
        return [answer for address in found for answer in resolve(address, port, *args, **options)]

    def gethostbyname(host):
        found = look_up(host)
        return found[0] if found else resolve_one(host)

    _socket.getaddrinfo = getaddrinfo
    _socket.gethostbyname = gethostbyname


if "SIMULATED_DNS" in os.environ:
    _install(os.environ["SIMULATED_DNS"], os.environ["SIMULATED_NAMESPACE"])
