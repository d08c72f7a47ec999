"""The shape of a pod: the fields of `v1` Pod that strict reading knows (Kubernetes 1.36)."""

from __future__ import annotations

from tests.simulators.kubernetes.fields import fields

OBJECT_META = fields(
    "name generateName namespace uid resourceVersion creationTimestamp deletionTimestamp selfLink "
    "generation# deletionGracePeriodSeconds# labels% annotations% finalizers* managedFields~",
    ownerReferences=[fields("apiVersion! kind! name! uid! controller? blockOwnerDeletion?")],
)
TEMPLATE_META = fields("name namespace labels% annotations% finalizers*")

CONDITION = fields(
    "type! status! reason message lastTransitionTime lastProbeTime lastUpdateTime observedGeneration#"
)
LABEL_SELECTOR = fields("matchLabels%", matchExpressions=[fields("key! operator! values*")])
_NAME = fields("name")
_KEYS = [fields("key! path! mode#")]
_FIELD_REF = fields("fieldPath! apiVersion")
_RESOURCE_REF = fields("resource! containerName divisor|")
_DOWNWARD = [fields("path! mode#", fieldRef=_FIELD_REF, resourceFieldRef=_RESOURCE_REF)]

TOLERATION = fields("key operator value effect tolerationSeconds#")

_EXEC = fields("command*")
_HTTP = fields("host path port|! scheme", httpHeaders=[fields("name! value!")])
_TCP = fields("host port|!")
_HANDLER = fields("", exec=_EXEC, httpGet=_HTTP, tcpSocket=_TCP, sleep=fields("seconds#!"))
_PROBE = fields(
    "failureThreshold# initialDelaySeconds# periodSeconds# successThreshold# timeoutSeconds# "
    "terminationGracePeriodSeconds#",
    exec=_EXEC,
    httpGet=_HTTP,
    tcpSocket=_TCP,
    grpc=fields("port#! service"),
)

_PROFILE = fields("type! localhostProfile")
_SE_LINUX = fields("level role type user")
_CONTAINER_SECURITY = fields(
    "allowPrivilegeEscalation? privileged? procMount readOnlyRootFilesystem? runAsGroup# runAsNonRoot? "
    "runAsUser# windowsOptions~",
    appArmorProfile=_PROFILE,
    capabilities=fields("add* drop*"),
    seLinuxOptions=_SE_LINUX,
    seccompProfile=_PROFILE,
)
_POD_SECURITY = fields(
    "fsGroup# fsGroupChangePolicy runAsGroup# runAsNonRoot? runAsUser# seLinuxChangePolicy "
    "supplementalGroups~ supplementalGroupsPolicy windowsOptions~",
    appArmorProfile=_PROFILE,
    seLinuxOptions=_SE_LINUX,
    seccompProfile=_PROFILE,
    sysctls=[fields("name! value!")],
)

RESOURCES = fields("limits= requests=", claims=[fields("name! request")])
_ENV_SOURCE = fields(
    "",
    configMapKeyRef=fields("key! name optional?"),
    fieldRef=_FIELD_REF,
    fileKeyRef=fields("key! path! volumeName! optional?"),
    resourceFieldRef=_RESOURCE_REF,
    secretKeyRef=fields("key! name optional?"),
)
CONTAINER = fields(
    "name! image imagePullPolicy command* args* workingDir restartPolicy stdin? stdinOnce? tty? "
    "terminationMessagePath terminationMessagePolicy restartPolicyRules~",
    env=[fields("name! value", valueFrom=_ENV_SOURCE)],
    envFrom=[
        fields("prefix", configMapRef=fields("name optional?"), secretRef=fields("name optional?")),
    ],
    lifecycle=fields("stopSignal", postStart=_HANDLER, preStop=_HANDLER),
    livenessProbe=_PROBE,
    readinessProbe=_PROBE,
    startupProbe=_PROBE,
    ports=[fields("containerPort#! hostIP hostPort# name protocol")],
    resizePolicy=[fields("resourceName! restartPolicy!")],
    resources=RESOURCES,
    securityContext=_CONTAINER_SECURITY,
    volumeDevices=[fields("devicePath! name!")],
    volumeMounts=[
        fields("mountPath! name! mountPropagation readOnly? recursiveReadOnly subPath subPathExpr"),
    ],
)

_CLAIM_SPEC = fields(
    "accessModes* storageClassName volumeAttributesClassName volumeMode volumeName dataSource~ "
    "dataSourceRef~",
    resources=RESOURCES,
    selector=LABEL_SELECTOR,
)
CLAIM_TEMPLATE = fields("apiVersion kind", metadata=TEMPLATE_META, spec=_CLAIM_SPEC)
_VOLUME = fields(
    # The rarely used kinds of volumes are let through as they are.
    "name! awsElasticBlockStore~ azureDisk~ azureFile~ cephfs~ cinder~ fc~ flexVolume~ gcePersistentDisk~ "
    "glusterfs~ iscsi~ portworxVolume~ quobyte~ rbd~ scaleIO~ storageos~ vsphereVolume~",
    configMap=fields("name defaultMode# optional?", items=_KEYS),
    csi=fields("driver! fsType readOnly? volumeAttributes%", nodePublishSecretRef=_NAME),
    downwardAPI=fields("defaultMode#", items=_DOWNWARD),
    emptyDir=fields("medium sizeLimit|"),
    ephemeral=fields("", volumeClaimTemplate=CLAIM_TEMPLATE),
    hostPath=fields("path! type"),
    image=fields("pullPolicy reference"),
    nfs=fields("path! server! readOnly?"),
    persistentVolumeClaim=fields("claimName! readOnly?"),
    projected=fields(
        "defaultMode#",
        sources=[
            fields(
                "clusterTrustBundle~ podCertificate~",
                configMap=fields("name optional?", items=_KEYS),
                downwardAPI=fields("", items=_DOWNWARD),
                secret=fields("name optional?", items=_KEYS),
                serviceAccountToken=fields("path! audience expirationSeconds#"),
            )
        ],
    ),
    secret=fields("secretName defaultMode# optional?", items=_KEYS),
)

POD_SPEC = fields(
    "activeDeadlineSeconds# affinity~ automountServiceAccountToken? containers! dnsPolicy "
    "enableServiceLinks? ephemeralContainers~ hostIPC? hostNetwork? hostPID? hostUsers? hostname "
    "hostnameOverride nodeName nodeSelector% overhead= preemptionPolicy priority# priorityClassName "
    "restartPolicy runtimeClassName schedulerName serviceAccount serviceAccountName setHostnameAsFQDN? "
    "shareProcessNamespace? subdomain terminationGracePeriodSeconds#",
    containers=[CONTAINER],
    initContainers=[CONTAINER],
    dnsConfig=fields("nameservers* searches*", options=[fields("name value")]),
    hostAliases=[fields("ip! hostnames*")],
    imagePullSecrets=[_NAME],
    os=fields("name!"),
    readinessGates=[fields("conditionType!")],
    resourceClaims=[fields("name! resourceClaimName resourceClaimTemplateName")],
    resources=RESOURCES,
    schedulingGates=[fields("name!")],
    schedulingGroup=fields("podGroupName"),
    securityContext=_POD_SECURITY,
    tolerations=[TOLERATION],
    topologySpreadConstraints=[
        fields(
            "matchLabelKeys* maxSkew#! minDomains# nodeAffinityPolicy nodeTaintsPolicy topologyKey! "
            "whenUnsatisfiable!",
            labelSelector=LABEL_SELECTOR,
        )
    ],
    volumes=[_VOLUME],
)
POD_TEMPLATE = fields("", metadata=TEMPLATE_META, spec=POD_SPEC)
