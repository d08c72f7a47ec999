"""From a Prefect credentials block to a signed request, with no secret where people look."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.types import SecretDict
from pydantic import SecretStr

from prefect_torch_elastic.errors import MissingExtraError, StoreError
from prefect_torch_elastic.store import open_store, probe_store
from prefect_torch_elastic.store.answers import AnswerKind, read_answer
from prefect_torch_elastic.store.awskeys import AwsProvider
from prefect_torch_elastic.store.credentials import connect, describe_credentials, find_secrets

pytest.importorskip("obstore")
SECRET = "wJalrXUtnFEMI-topsecret"


# The fields of the blocks of prefect-aws 0.7, prefect-gcp 0.6 and prefect-azure 0.4, under their names.
@dataclass
class AwsClientParameters:
    endpoint_url: str | None = None
    verify: bool | Path | None = True
    verify_cert_path: Path | None = None
    use_ssl: bool = True
    config: dict[str, Any] | None = None


@dataclass
class AssumeRoleParameters:
    RoleSessionName: str | None = None

    def get_params_override(self) -> dict[str, Any]:
        return {"RoleSessionName": self.RoleSessionName} if self.RoleSessionName else {}


@dataclass
class AwsCredentials:
    aws_access_key_id: str | None = None
    aws_secret_access_key: SecretStr | None = None
    aws_session_token: str | None = None
    profile_name: str | None = None
    region_name: str | None = None
    aws_client_parameters: AwsClientParameters = field(default_factory=AwsClientParameters)
    assume_role_arn: str | None = None
    assume_role_kwargs: AssumeRoleParameters = field(default_factory=AssumeRoleParameters)


@dataclass
class MinIOCredentials:
    minio_root_user: str
    minio_root_password: SecretStr
    region_name: str | None = None
    aws_client_parameters: AwsClientParameters = field(default_factory=AwsClientParameters)


@dataclass
class GcpCredentials:
    service_account_file: Path | None = None
    service_account_info: Any = None
    project: str | None = None


@dataclass
class AzureBlobStorageCredentials:
    connection_string: SecretStr | None = None
    account_url: str | None = None
    client_id: str | None = None
    tenant_id: str | None = None
    client_secret: SecretStr | None = None


class TeamCredentials(AwsCredentials):
    """A user's own block."""


AWS = AwsCredentials("AKIAEXAMPLE", SecretStr(SECRET), region_name="eu-west-1")
ACCOUNT = {"type": "service_account", "private_key": SECRET, "client_email": "a@b.c"}
CONNECTION = (
    f"DefaultEndpointsProtocol=https;AccountName=models;AccountKey={SECRET}==;EndpointSuffix=core.windows.net"
)
BLOCKS = [
    pytest.param(AWS, id="aws"),
    pytest.param(MinIOCredentials("root", SecretStr(SECRET)), id="minio"),
    pytest.param(GcpCredentials(service_account_info=SecretDict(ACCOUNT)), id="gcp"),
    pytest.param(AzureBlobStorageCredentials(connection_string=SecretStr(CONNECTION)), id="azure"),
]


pytestmark = pytest.mark.usefixtures("no_cloud_settings")


@pytest.mark.parametrize("block", BLOCKS)
def test_description_is_json_with_the_secret_and_nothing_shows_it(block):
    described = describe_credentials(block)
    assert SECRET in json.dumps(described)
    assert any(SECRET in secret for secret in find_secrets(described))
    scheme = {"aws": "s3", "gcp": "gs", "azure": "az"}[described["kind"]]
    connection = connect(scheme, described)
    for shown in (connection, connection.provider):
        assert SECRET not in repr(shown)
        assert SECRET not in str(shown)


def test_store_of_a_block_shows_no_secret(s3):
    block = AwsCredentials(
        "AKIAEXAMPLE", SecretStr(SECRET), "token-topsecret", None, None, AwsClientParameters(s3.endpoint)
    )
    store = open_store(s3.url("runs"), describe_credentials(block))
    probe_store(store)
    assert "topsecret" not in f"{store!r} {store} {store.url}"


def test_aws_block_gives_keys_region_and_endpoint():
    block = AwsCredentials(
        "AKIAEXAMPLE",
        SecretStr(SECRET),
        region_name="eu-west-1",
        aws_client_parameters=AwsClientParameters("http://minio:9000", verify=False),
    )
    connection = connect("s3", describe_credentials(block))
    assert connection.endpoint == "http://minio:9000"
    assert connection.config["region"] == "eu-west-1"
    assert connection.client_options == {"allow_invalid_certificates": True}
    assert connection.provider is not None
    keys = connection.provider()
    assert (keys["access_key_id"], keys["secret_access_key"]) == ("AKIAEXAMPLE", SECRET)


def test_block_is_told_by_its_class_or_a_parent_of_it():
    assert describe_credentials(TeamCredentials("AKIA", SecretStr(SECRET)))["access_key_id"] == "AKIA"
    with pytest.raises(StoreError, match=r"`SimpleNamespace`.*`AwsCredentials`"):
        describe_credentials(SimpleNamespace(password=SECRET))


def test_minio_block_is_used_against_its_endpoint(s3):
    block = MinIOCredentials("root", SecretStr(SECRET), None, AwsClientParameters(s3.endpoint))
    signers: list[str] = []
    s3.before = lambda request: signers.append(request.headers["authorization"])
    probe_store(open_store(s3.url("runs"), describe_credentials(block)))
    assert all("Credential=root/" in signer and "/us-east-1/s3/" in signer for signer in signers)


def test_payloads_are_not_hashed_for_the_signature(s3):
    hashes: list[str] = []
    s3.before = lambda request: hashes.append(request.headers["x-amz-content-sha256"])
    open_store(s3.url("runs"), s3.credentials).put("block", bytes(1 << 20))
    assert hashes == ["UNSIGNED-PAYLOAD"]


def test_certificate_and_account_files_are_read_in_the_driver(tmp_path):
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----")
    (tmp_path / "account.json").write_text(json.dumps(ACCOUNT))
    aws = AwsCredentials(aws_client_parameters=AwsClientParameters(verify_cert_path=tmp_path / "ca.pem"))
    assert describe_credentials(aws)["certificate"] == "-----BEGIN CERTIFICATE-----"
    gcp = GcpCredentials(service_account_file=tmp_path / "account.json")
    assert describe_credentials(gcp)["service_account_info"] == ACCOUNT
    with pytest.raises(StoreError, match=r"none\.json.*cannot be read"):
        describe_credentials(GcpCredentials(service_account_file=tmp_path / "none.json"))


def test_block_for_another_service_is_refused():
    with pytest.raises(StoreError, match=r"for `gcp`, and `s3://` needs `aws`"):
        open_store("s3://bucket/runs", {"kind": "gcp"})


def test_environment_fills_in_what_the_block_leaves_out(s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    signers: list[str] = []
    s3.before = lambda request: signers.append(request.headers["authorization"])
    open_store(s3.url("runs"), describe_credentials(AwsCredentials("AKIA", SecretStr(SECRET)))).put("a", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    open_store(s3.url("runs")).put("a", b"x")
    assert "Credential=AKIA/" in signers[0]
    assert "Credential=AKIAENVIRONMENT/" in signers[1]
    assert all("/eu-central-1/s3/" in signer for signer in signers)


# --- keys that end ---------------------------------------------------------------------------------------


def give_keys_in_turn(monkeypatch, *, lifetime_seconds: float) -> list[str]:
    """Let boto3 assume a role with new keys each time; returns the key ids that were handed out."""
    boto3 = pytest.importorskip("boto3")
    given: list[str] = []

    def assume_role(**request: Any) -> dict[str, Any]:
        assert request["RoleArn"] == "arn:aws:iam::1:role/train"
        given.append(f"ASIA{len(given)}")
        ends = datetime.now(UTC) + timedelta(seconds=lifetime_seconds)
        keys = {"AccessKeyId": given[-1], "SecretAccessKey": SECRET, "SessionToken": "t", "Expiration": ends}
        return {"Credentials": keys}

    session = SimpleNamespace(client=lambda name: SimpleNamespace(assume_role=assume_role))
    monkeypatch.setattr(boto3, "Session", lambda **_: session)
    return given


ROLE = AwsCredentials(assume_role_arn="arn:aws:iam::1:role/train")


def test_keys_are_asked_for_again_when_they_are_about_to_end(s3, monkeypatch):
    given = give_keys_in_turn(monkeypatch, lifetime_seconds=1.0)
    store = open_store(s3.url("runs"), {**describe_credentials(ROLE), "endpoint_url": s3.endpoint})
    deadline = datetime.now(UTC) + timedelta(seconds=5)
    while len(given) < 3 and datetime.now(UTC) < deadline:
        store.put("a", b"x")
    assert len(given) >= 3


def test_expired_keys_are_replaced_in_the_middle_of_a_save_c058(s3, monkeypatch):
    given = give_keys_in_turn(monkeypatch, lifetime_seconds=3600.0)
    store = open_store(s3.url("runs"), {**describe_credentials(ROLE), "endpoint_url": s3.endpoint})
    store.put("block/0", b"x")
    s3.set_faults(expired_keys=["ASIA0"])
    store.put("block/1", b"x")
    assert [entry.key for entry in store.list("")] == ["block/0", "block/1"]
    assert given == ["ASIA0", "ASIA1"]


def test_keys_that_cannot_be_renewed_are_named(s3):
    store = open_store(s3.url("runs"), s3.credentials)
    s3.set_faults(expired_keys=["AKIAEXAMPLE"])
    with pytest.raises(StoreError, match=r"400 ExpiredToken.*have expired") as caught:
        store.put("a", b"x")
    assert "not-for-the-eyes-of-others" not in str(caught.value)
    assert len([call for call in s3.calls() if call.method == "PUT"]) == 2


def test_provider_that_fails_is_quoted_without_the_secret(s3, monkeypatch):
    boto3 = pytest.importorskip("boto3")

    def fail(**_: Any) -> Any:
        raise ValueError(f"the profile `train` is broken: {SECRET}")

    monkeypatch.setattr(boto3, "Session", fail)
    block = AwsCredentials("AKIA", SecretStr(SECRET), profile_name="train")
    store = open_store(s3.url("runs"), {**describe_credentials(block), "endpoint_url": s3.endpoint})
    with pytest.raises(StoreError, match=r"the profile `train` is broken: \*\*\*"):
        store.put("a", b"x")


def test_profile_without_boto3_names_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(MissingExtraError, match="pip install boto3"):
        AwsProvider({"profile_name": "train"})()


def test_profile_in_the_home_folder_is_found(s3, monkeypatch, tmp_path):
    pytest.importorskip("boto3")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        f"[default]\naws_access_key_id = AKIAFILE\naws_secret_access_key = {SECRET}\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.endpoint)
    signers: list[str] = []
    s3.before = lambda request: signers.append(request.headers["authorization"])
    open_store(s3.url("runs")).put("a", b"x")
    assert "Credential=AKIAFILE/" in signers[0]


# --- the other clouds ------------------------------------------------------------------------------------


def test_gcp_block_gives_obstore_the_account_which_renews_its_own_tokens():
    connection = connect("gs", describe_credentials(GcpCredentials(service_account_info=SecretDict(ACCOUNT))))
    assert json.loads(connection.config["service_account_key"]) == ACCOUNT
    assert connect("gs", describe_credentials(GcpCredentials())).config == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            CONNECTION,
            {
                "account_name": "models",
                "account_key": f"{SECRET}==",
                "endpoint": "https://models.blob.core.windows.net",
            },
        ),
        (
            f"BlobEndpoint=https://models.blob.core.windows.net/;SharedAccessSignature=sv=1&sig={SECRET}",
            {
                "account_name": "models",
                "sas_key": f"sv=1&sig={SECRET}",
                "endpoint": "https://models.blob.core.windows.net",
            },
        ),
    ],
    ids=["key", "sas"],
)
def test_azure_connection_string_is_taken_apart(text, expected, monkeypatch):
    block = AzureBlobStorageCredentials(connection_string=SecretStr(text))
    assert connect("az", describe_credentials(block)).config == expected
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert connect("az", None).config == expected


def test_azure_principal_gives_obstore_what_it_renews_tokens_with():
    block = AzureBlobStorageCredentials(
        account_url="https://models.blob.core.windows.net/",
        client_id="client",
        tenant_id="tenant",
        client_secret=SecretStr(SECRET),
    )
    assert connect("az", describe_credentials(block)).config == {
        "account_name": "models",
        "client_id": "client",
        "tenant_id": "tenant",
        "client_secret": SECRET,
        "endpoint": "https://models.blob.core.windows.net",
    }


def test_signed_url_in_an_error_of_the_client_is_cut_off():
    error = OSError(
        f"error sending request for https://models.blob.core.windows.net/c/k?sv=1&sig={SECRET} now"
    )
    answer = read_answer(error, service="az")
    assert SECRET not in answer.said
    assert answer.kind is AnswerKind.REFUSED
