package request_test

import (
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/plugin"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/imagevolume/request"
)

func source(image string, policy request.PullPolicy) []request.Source {
	return []request.Source{{Image: image, PullPolicy: policy}}
}

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
`, []request.Volume{{Sources: source("example.com/llama:7b", request.Always), MountPath: "/models", Exec: true}}},
		{"YAML with the least", "- {image: llama:7b, mountPath: /models}", []request.Volume{
			{Sources: source("llama:7b", request.IfNotPresent), MountPath: "/models"},
		}},
		{"JSON", `[{"image": "llama:7b", "mountPath": "/models", "pullPolicy": "Never", "readOnly": true, "exec": false}]`, []request.Volume{
			{Sources: source("llama:7b", request.Never), MountPath: "/models"},
		}},
		{"JSON that is not YAML", "[\n\t{\n\t\t\"image\":\"llama:7b\",\n\t\t\"mountPath\":\"\\/\\ud83e\\udd99\"\n\t}\n]", []request.Volume{
			{Sources: source("llama:7b", request.IfNotPresent), MountPath: "/🦙"},
		}},
		{"YAML with document marks and comments", "--- # models\n- image: llama:7b # small\n  mountPath: '/models'\n...\n", []request.Volume{
			{Sources: source("llama:7b", request.IfNotPresent), MountPath: "/models"},
		}},
		{"order is kept", "- {image: b:1, mountPath: /b}\n- {image: a:1, mountPath: /a}\n- {image: b:1, mountPath: /bb}", []request.Volume{
			{Sources: source("b:1", request.IfNotPresent), MountPath: "/b"},
			{Sources: source("a:1", request.IfNotPresent), MountPath: "/a"},
			{Sources: source("b:1", request.IfNotPresent), MountPath: "/bb"},
		}},
		{"path is cleaned", "- {image: a:1, mountPath: //opt/./models//}", []request.Volume{
			{Sources: source("a:1", request.IfNotPresent), MountPath: "/opt/models"},
		}},
		{"names that look reserved", "- {image: a:1, mountPath: /processes}\n- {image: a:1, mountPath: /opt/proc}\n- {image: a:1, mountPath: /..a}", []request.Volume{
			{Sources: source("a:1", request.IfNotPresent), MountPath: "/processes"},
			{Sources: source("a:1", request.IfNotPresent), MountPath: "/opt/proc"},
			{Sources: source("a:1", request.IfNotPresent), MountPath: "/..a"},
		}},
		{"string by tag", "- {image: !!str 7, mountPath: /a}", []request.Volume{
			{Sources: source("7", request.Always), MountPath: "/a"},
		}},
		{"no tag", "- {image: example.com:5000/a/b, mountPath: /a}", []request.Volume{
			{Sources: source("example.com:5000/a/b", request.Always), MountPath: "/a"},
		}},
		{"tag latest", "- {image: 'a:latest', mountPath: /a}", []request.Volume{
			{Sources: source("a:latest", request.Always), MountPath: "/a"},
		}},
		{"tag latest and digest", "- {image: 'a:latest" + digest + "', mountPath: /a}", []request.Volume{
			{Sources: source("a:latest"+digest, request.Always), MountPath: "/a"},
		}},
		{"digest", "- {image: 'a" + digest + "', mountPath: /a}", []request.Volume{
			{Sources: source("a"+digest, request.IfNotPresent), MountPath: "/a"},
		}},
		{"tag and digest", "- {image: 'a:1" + digest + "', mountPath: /a}", []request.Volume{
			{Sources: source("a:1"+digest, request.IfNotPresent), MountPath: "/a"},
		}},
		{"image id", "- {image: '" + id + "', mountPath: /a}", []request.Volume{
			{Sources: source(id, request.IfNotPresent), MountPath: "/a"},
		}},
		{"longest path", "- {image: a:1, mountPath: " + strings.Repeat("/abcdefg", 511) + "/abcdef}", []request.Volume{
			{Sources: source("a:1", request.IfNotPresent), MountPath: strings.Repeat("/abcdefg", 511) + "/abcdef"},
		}},
		{"media types and sub path", "- {image: a:1, mountPath: /a, mediaTypes: [application/*tar*, '[a-z]/?'], subPath: ./w//x/}", []request.Volume{{
			MountPath: "/a",
			Sources:   []request.Source{{Image: "a:1", PullPolicy: request.IfNotPresent, MediaTypes: []string{"application/*tar*", "[a-z]/?"}, SubPath: "w/x"}},
		}}},
		{"images", `
- mountPath: /a
  images:
    - image: a:1
    - {image: b, subPath: "...", mediaTypes: ["*"]}
    - image: a:1
`, []request.Volume{{MountPath: "/a", Sources: []request.Source{
			{Image: "a:1", PullPolicy: request.IfNotPresent},
			{Image: "b", PullPolicy: request.Always, SubPath: "...", MediaTypes: []string{"*"}},
			{Image: "a:1", PullPolicy: request.IfNotPresent},
		}}}},
		{"images with one policy", `[{"images": [{"image": "a"}, {"image": "b:1"}], "mountPath": "/a", "pullPolicy": "Never"}]`, []request.Volume{{
			MountPath: "/a",
			Sources:   []request.Source{{Image: "a", PullPolicy: request.Never}, {Image: "b:1", PullPolicy: request.Never}},
		}}},
		{"writable", "- {image: a:1, mountPath: /a, readOnly: false}", []request.Volume{{
			MountPath: "/a", Sources: source("a:1", request.IfNotPresent), Scratch: request.ScratchContainer, ScratchSize: 1 << 30,
		}}},
		{"writable for the pod", "- {scratchSize: 16m, scratch: pod, image: a:1, mountPath: /a, readOnly: false}", []request.Volume{{
			MountPath: "/a", Sources: source("a:1", request.IfNotPresent), Scratch: request.ScratchPod, ScratchSize: 16 << 20,
		}}},
		{"largest", "- {scratchSize: 16TiB, image: a:1, mountPath: /a, readOnly: false}", []request.Volume{{
			MountPath: "/a", Sources: source("a:1", request.IfNotPresent), Scratch: request.ScratchContainer, ScratchSize: 16 << 40,
		}}},
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
	require.Equal(t, []request.Volume{{Sources: source("b", request.Always), MountPath: "/b", Key: pod}}, request.All(annotations))
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
