"""Access control of each endpoint, built from the options: TLS, tokens, restricted APIs, and which headers are passed
on to models. Invariant: a reload applies all files or none."""

from __future__ import annotations

import argparse
import logging
import ssl

from shmserve.extras import install_command
from shmserve.gateway.auth import restricted_apis, tls, tokens
from shmserve.gateway.auth.access import EndpointAccess
from shmserve.gateway.auth.browsers import BrowserRules, read_servers
from shmserve.gateway.auth.header_forwarding import Forward
from shmserve.gateway.auth.tls import Files, FlagFile
from shmserve.gateway.limits.proxies import is_local
from shmserve.protocol.roles import INFER, OBSERVE, PAGE, names
from shmserve.terminal.errors import Failed, Misuse

log = logging.getLogger("shmserve.gateway")


class Guard:
    """Access control of one endpoint."""

    def __init__(self, access: EndpointAccess, forward: Forward | None, files: Files | None, alpn: str) -> None:
        self.access = access
        self.forward = forward
        self._files = files
        self._alpn = alpn
        self.tls = self.read_tls()

    def renew(self, context: ssl.SSLContext | None, holders: tokens.Tokens | None) -> None:
        """Replaces certificates and tokens for new connections and requests."""
        self.tls = context
        self.access.renew(holders)

    def read_tls(self) -> ssl.SSLContext | None:
        return None if self._files is None else tls.context(self._files, self._alpn)

    @property
    def exposed(self) -> str | None:
        return None if self._files is None else tls.exposed(self._files)

    def exposure(self, address: str) -> str | None:
        """The warning for an endpoint that is reachable from other machines without authentication or TLS."""
        if is_local(address):
            return None
        certified = self.tls is not None and self.tls.verify_mode == ssl.CERT_REQUIRED
        known = certified or self.access.tokens is not None
        if self.tls is not None and known:
            return None
        warnings = []
        if not known:
            warnings.append("any client can use it without authentication (--tokens-file, --tls-client-ca)")
        if self.tls is None:
            warnings.append("traffic, including tokens, is not encrypted (--tls-cert)")
        return f"{address} is reachable from other machines: {', and '.join(warnings)}"


class Guards:
    """Access control of all endpoints. Raises Failed and Misuse."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._tokens_file: str | None = args.tokens_file
        holders = self._read_tokens()
        common = _common(args)
        try:
            restricted = restricted_apis.Restrictions(args.http_restricted_api)
            rpc_restricted = restricted_apis.Restrictions(args.grpc_restricted_protocol, "protocol")
        except ValueError as error:
            raise Misuse(str(error)) from error
        withheld = (
            restricted.headers
            | rpc_restricted.headers
            | ({"authorization", "x-api-key"} if holders is not None else set())
        )
        forward = _forward("--http-header-forward-pattern", args.http_header_forward_pattern, withheld)
        rpc_forward = _forward("--grpc-header-forward-pattern", args.grpc_header_forward_pattern, withheld)
        roles, rpc_roles = _http_roles(args, holders), _roles(args.grpc_roles or args.http_roles, holders)
        hosts, origins = [(text or "").split(",") for text in (args.http_allowed_hosts, args.http_allowed_origins)]
        servers = read_servers(args.page_servers or "")
        browsers = BrowserRules([*hosts, args.http_address], origins, common is not None, servers)
        try:
            self.http = Guard(
                EndpointAccess(roles, holders, restricted, browsers=browsers), forward, common, "http/1.1"
            )
            observers = names(OBSERVE) if holders is None else []
            self.metrics = Guard(EndpointAccess(observers, holders, browsers=browsers), None, common, "http/1.1")
            self.rpc = Guard(
                EndpointAccess(rpc_roles, holders, rpc_restricted, "--grpc-roles"),
                rpc_forward,
                _rpc(args) or common,
                "h2",
            )
        except tls.BadCertificate as error:
            raise Failed(str(error)) from error
        self._warn_of_exposed_keys()

    @property
    def _all(self) -> tuple[Guard, ...]:
        return self.http, self.metrics, self.rpc

    def _read_tokens(self) -> tokens.Tokens | None:
        if self._tokens_file is None:
            return None
        try:
            return tokens.load(self._tokens_file)
        except tokens.BadTokens as error:
            raise Failed(f"--tokens-file {self._tokens_file}: {error}") from error

    def read_again(self) -> None:
        """Reloads certificates and tokens. If it raises Failed, nothing has changed."""
        holders = self._read_tokens()
        try:
            contexts = [guard.read_tls() for guard in self._all]
        except tls.BadCertificate as error:
            raise Failed(str(error)) from error
        for guard, context in zip(self._all, contexts, strict=True):
            guard.renew(context, holders)
        self._warn_of_exposed_keys()

    def _warn_of_exposed_keys(self) -> None:
        for text in {guard.exposed for guard in self._all} - {None}:
            log.warning("%s", text)


def _roles(flag: str | None, holders: tokens.Tokens | None) -> list[str]:
    """Roles of clients without a token."""
    if flag is not None:
        return flag.split(",")
    return names(INFER | OBSERVE) if holders is None else []


def _http_roles(args: argparse.Namespace, holders: tokens.Tokens | None) -> list[str]:
    """By default the page is only available on this machine, as it shows more of the server than clients need."""
    roles = _roles(args.http_roles, holders)
    return [*roles, PAGE] if roles and args.http_roles is None and is_local(args.http_address) else roles


def _common(args: argparse.Namespace) -> Files | None:
    if args.tls_cert is None:
        for flag, file in (("--tls-key", args.tls_key), ("--tls-client-ca", args.tls_client_ca)):
            if file is not None:
                raise Misuse(f"{flag} requires --tls-cert")
        return None
    return Files(
        FlagFile(args.tls_cert, "--tls-cert"),
        _given(args.tls_key, "--tls-key"),
        _given(args.tls_client_ca, "--tls-client-ca"),
    )


def _rpc(args: argparse.Namespace) -> Files | None:
    """Triton's flags, which apply to gRPC only."""
    certificate, key, root = args.grpc_server_cert, args.grpc_server_key, args.grpc_root_cert
    if not (args.grpc_use_ssl or args.grpc_use_ssl_mutual):
        if certificate or key or root:
            raise Misuse("--grpc-server-cert, --grpc-server-key and --grpc-root-cert require --grpc-use-ssl")
        return None
    if certificate is None:
        raise Misuse("--grpc-use-ssl requires --grpc-server-cert")
    if args.grpc_use_ssl_mutual and root is None:
        raise Misuse("--grpc-use-ssl-mutual requires --grpc-root-cert")
    mutual = root if args.grpc_use_ssl_mutual else None
    return Files(
        FlagFile(certificate, "--grpc-server-cert"),
        _given(key, "--grpc-server-key"),
        _given(mutual, "--grpc-root-cert"),
    )


def _given(path: str | None, flag: str) -> FlagFile | None:
    return None if path is None else FlagFile(path, flag)


def _forward(flag: str, pattern: str | None, withheld: set[str]) -> Forward | None:
    if pattern is None:
        return None
    try:
        return Forward(pattern, withheld)
    except ValueError as error:
        raise Misuse(f"{flag}: {error}") from error
    except ImportError as error:
        raise Failed(f"{flag} requires the package google-re2: {install_command('server')}") from error
