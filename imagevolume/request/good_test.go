package request_test

import (
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/plugin"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/imagevolume/request"
)

func TestForContainerReadsVolumes(t *testing.T) {
	id := strings.Repeat("0123456789abcdef", 4)
	digest := "@sha256:" + id
	for _, tc := range []struct {
		name, text string
		want       []request.Volume
	}{
		{"YAML with all keys", `
- image: example.com/llama:7b
  mountPath: /models
  pullPolicy: Always
  readOnly: true
  exec: true
`, []request.Volume{{Image: "example.com/llama:7b", MountPath: "/models", PullPolicy: request.Always, Exec: true}}},
		{"YAML with the least", "- {image: llama:7b, mountPath: /models}", []request.Volume{
			{Image: "llama:7b", MountPath: "/models", PullPolicy: request.IfNotPresent},
		}},
		{"JSON", `[{"image": "llama:7b", "mountPath": "/models", "pullPolicy": "Never", "readOnly": true, "exec": false}]`, []request.Volume{
			{Image: "llama:7b", MountPath: "/models", PullPolicy: request.Never},
		}},
		{"JSON that is not YAML", "[\n\t{\n\t\t\"image\":\"llama:7b\",\n\t\t\"mountPath\":\"\\/\\ud83e\\udd99\"\n\t}\n]", []request.Volume{
			{Image: "llama:7b", MountPath: "/🦙", PullPolicy: request.IfNotPresent},
		}},
		{"YAML with document marks and comments", "--- # models\n- image: llama:7b # small\n  mountPath: '/models'\n...\n", []request.Volume{
			{Image: "llama:7b", MountPath: "/models", PullPolicy: request.IfNotPresent},
		}},
		{"order is kept", "- {image: b:1, mountPath: /b}\n- {image: a:1, mountPath: /a}\n- {image: b:1, mountPath: /bb}", []request.Volume{
			{Image: "b:1", MountPath: "/b", PullPolicy: request.IfNotPresent},
			{Image: "a:1", MountPath: "/a", PullPolicy: request.IfNotPresent},
			{Image: "b:1", MountPath: "/bb", PullPolicy: request.IfNotPresent},
		}},
		{"path is cleaned", "- {image: a:1, mountPath: //opt/./models//}", []request.Volume{
			{Image: "a:1", MountPath: "/opt/models", PullPolicy: request.IfNotPresent},
		}},
		{"names that look reserved", "- {image: a:1, mountPath: /processes}\n- {image: a:1, mountPath: /opt/proc}\n- {image: a:1, mountPath: /..a}", []request.Volume{
			{Image: "a:1", MountPath: "/processes", PullPolicy: request.IfNotPresent},
			{Image: "a:1", MountPath: "/opt/proc", PullPolicy: request.IfNotPresent},
			{Image: "a:1", MountPath: "/..a", PullPolicy: request.IfNotPresent},
		}},
		{"string by tag", "- {image: !!str 7, mountPath: /a}", []request.Volume{
			{Image: "7", MountPath: "/a", PullPolicy: request.Always},
		}},
		{"no tag", "- {image: example.com:5000/a/b, mountPath: /a}", []request.Volume{
			{Image: "example.com:5000/a/b", MountPath: "/a", PullPolicy: request.Always},
		}},
		{"tag latest", "- {image: 'a:latest', mountPath: /a}", []request.Volume{
			{Image: "a:latest", MountPath: "/a", PullPolicy: request.Always},
		}},
		{"tag latest and digest", "- {image: 'a:latest" + digest + "', mountPath: /a}", []request.Volume{
			{Image: "a:latest" + digest, MountPath: "/a", PullPolicy: request.Always},
		}},
		{"digest", "- {image: 'a" + digest + "', mountPath: /a}", []request.Volume{
			{Image: "a" + digest, MountPath: "/a", PullPolicy: request.IfNotPresent},
		}},
		{"tag and digest", "- {image: 'a:1" + digest + "', mountPath: /a}", []request.Volume{
			{Image: "a:1" + digest, MountPath: "/a", PullPolicy: request.IfNotPresent},
		}},
		{"image id", "- {image: '" + id + "', mountPath: /a}", []request.Volume{
			{Image: id, MountPath: "/a", PullPolicy: request.IfNotPresent},
		}},
		{"longest path", "- {image: a:1, mountPath: " + strings.Repeat("/abcdefg", 511) + "/abcdef}", []request.Volume{
			{Image: "a:1", MountPath: strings.Repeat("/abcdefg", 511) + "/abcdef", PullPolicy: request.IfNotPresent},
		}},
		{"no volumes", "[]", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			annotations := map[string]string{pod: tc.text, "example.com/other": "x"}
			got, err := request.ForContainer(web, annotations, "server")
			require.NoError(t, err)
			for i := range tc.want {
				tc.want[i].Key = pod
			}
			require.Equal(t, tc.want, append([]request.Volume(nil), got...))
			require.Equal(t, tc.want, request.All(annotations))
		})
	}
}

func TestForContainerTakesMostVolumesAllowed(t *testing.T) {
	got, err := request.ForContainer(web, map[string]string{bare: list(64)}, "server")
	require.NoError(t, err)
	require.Len(t, got, 64)
}

// The choice of the key is held against NRI's own, over every set of keys.
func TestForContainerChoosesKeyAsNRI(t *testing.T) {
	keys := []string{bare, pod, server, request.Domain + "/container.db"}
	for set := range 1 << len(keys) {
		annotations := map[string]string{}
		for i, key := range keys {
			if set&(1<<i) != 0 {
				annotations[key] = "- {image: a, mountPath: /from" + strings.Repeat("/x", i) + "}"
			}
		}
		for _, container := range []string{"server", "db", "sidecar", ""} {
			volumes, err := request.ForContainer(web, annotations, container)
			require.NoError(t, err)
			want, ok := plugin.GetEffectiveAnnotation(&api.PodSandbox{Annotations: annotations}, request.Domain, container)
			require.Len(t, volumes, map[bool]int{true: 1, false: 0}[ok])
			if ok {
				require.Equal(t, want, annotations[volumes[0].Key])
				require.Contains(t, want, volumes[0].MountPath+"}")
				require.Contains(t, request.All(annotations), volumes[0])
			}
		}
	}
}

func TestFaultsStayWithTheirContainers(t *testing.T) {
	good, faulty := "- {image: a, mountPath: /a}", "- {image: a}"
	annotations := map[string]string{server: faulty, request.Domain + "/container.db": good, pod: "[]"}
	_, err := request.ForContainer(web, annotations, "server")
	require.Error(t, err)
	for _, container := range []string{"db", "sidecar"} {
		_, err := request.ForContainer(web, annotations, container)
		require.NoError(t, err)
	}
	require.Len(t, request.All(annotations), 1)

	// But nobody knows whom a misspelt key is for.
	annotations[request.Domain+"/contaner.sidecar"] = good
	for _, container := range []string{"server", "db", "sidecar"} {
		_, err := request.ForContainer(web, annotations, container)
		require.ErrorContains(t, err, "did you mean image-volume.ocihold.dev/container.sidecar?")
	}
	require.Empty(t, request.All(annotations))
}

func TestAllLeavesOutTheBareListThatNobodyGets(t *testing.T) {
	annotations := map[string]string{bare: "- {image: a, mountPath: /a}", pod: "- {image: b, mountPath: /b}"}
	require.Equal(t, []request.Volume{{Image: "b", MountPath: "/b", PullPolicy: request.Always, Key: pod}}, request.All(annotations))
}

func TestErrorsStayOnOneLineWithOddNames(t *testing.T) {
	_, err := request.ForContainer(request.Pod{Namespace: "a\nb", Name: "c d"}, map[string]string{pod: ""}, "")
	require.EqualError(t, err, `image volumes of container "" of pod "a\nb/c d": annotation image-volume.ocihold.dev/pod: is empty; write [] for no volume, or remove it`)
}

func TestOurs(t *testing.T) {
	for key, want := range map[string]bool{
		bare: true, pod: true, server: true, bare + "/": true, bare + "/x": true,
		"ocihold.dev/volumes": false, bare + ".example": false, "x" + bare: false, "": false,
	} {
		require.Equal(t, want, request.Ours(key), key)
	}
}

func TestContainerName(t *testing.T) {
	for _, tc := range []struct {
		name string
		oci  map[string]string
		want string
	}{
		{"label", map[string]string{"io.kubernetes.container.name": "a", "io.kubernetes.cri-o.Metadata": `{"name":"b"}`}, "a"},
		{"metadata", map[string]string{"io.kubernetes.cri-o.Metadata": `{"name":"b","attempt":1}`}, "b"},
		{"broken metadata", map[string]string{"io.kubernetes.cri-o.Metadata": `{"name":"b"`}, ""},
		{"neither", nil, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			require.Equal(t, tc.want, request.ContainerName(tc.oci))
		})
	}
}
