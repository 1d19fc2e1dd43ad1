package integration

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/realnode"
)

const (
	domain    = "image-volume.ocihold.dev"
	podKey    = domain + "/pod"
	serverKey = domain + "/container.server"
)

// entry is a list of one volume that is faulty by these fields.
func entry(fields ...string) string {
	text := strings.Join(fields, ", ")
	if !strings.Contains(text, "image:") {
		text = "image: example.com/llama:7b, " + text
	}
	if !strings.Contains(text, "mountPath:") {
		text += ", mountPath: /models"
	}
	return "- {" + text + "}"
}

// refusals are faults in the list that counts for the container server, and
// what the error says of them: place, fault, fix.
var refusals = []struct {
	name, key, text, fault, fix string
}{
	{"empty", serverKey, "", "is empty", "write [] for no volume, or remove it"},
	{"comment alone", serverKey, "# later", "is empty", "write [] for no volume, or remove it"},
	{"null", podKey, "~", "is null, not a list of volumes", `write "- image: ...", or [] for no volume`},
	{"name alone", domain, "example.com/llama:7b", `is the string "example.com/llama:7b", not a list of volumes`, `write "- image: ...", or [] for no volume`},
	{"number", podKey, "7", "is the number 7, not a list of volumes", `write "- image: ...", or [] for no volume`},
	{"mapping", serverKey, "image: llama\nmountPath: /models\n", "is a mapping, not a list of volumes", `write "- image: ...", or [] for no volume`},
	{"JSON object", domain, `{"image": "llama", "mountPath": "/models"}`, "is a mapping, not a list of volumes", `write "- image: ...", or [] for no volume`},
	{"broken YAML", serverKey, "- image: llama\n mountPath: /models\n", "is neither YAML nor JSON", "check indentation and quotes"},
	{"broken JSON", serverKey, `[{"image": "llama", "mountPath": "/models"}`, "is neither YAML nor JSON", "check indentation and quotes"},
	{"NUL", serverKey, "- image: llama\x00\n", "is neither YAML nor JSON", "check indentation and quotes"},
	{"two documents", serverKey, "[]\n---\n[]\n", "has more than one YAML document", "keep one list"},
	{"alias", serverKey, "- &a {image: llama, mountPath: /a}\n- *a\n", "line 1: has a YAML anchor or alias", "write the value out"},
	{"long", serverKey, strings.Repeat("#", 256<<10+1), "has more than 262144 bytes", "shorten it"},
	{"many volumes", serverKey, many(65), "has 65 volumes", "at most 64 are allowed"},

	{"volume is a name", serverKey, "- llama:7b", `[0]: is the string "llama:7b", not a volume`, "write image and mountPath"},
	{"second volume is null", podKey, "- {image: llama, mountPath: /a}\n-\n", "[1]: is null, not a volume", "write image and mountPath"},
	{"no image", serverKey, "- mountPath: /models", "[0]: has no image", "add image: NAME"},
	{"no mountPath", serverKey, "- image: llama", "[0]: has no mountPath", "add mountPath: /PATH"},
	{"misspelt field", serverKey, entry("pulPolicy: Always"), `[0]: unknown key "pulPolicy"`, `did you mean "pullPolicy"?`},
	{"Kubernetes' field", serverKey, entry("reference: llama"), `[0]: unknown key "reference"`, "known are image, images, mountPath, pullPolicy, mediaTypes, subPath, readOnly, scratch, scratchSize, exec"},
	{"merge", serverKey, entry("<<: {exec: true}"), `[0]: has a key that is "<<" of type !!merge`, "known are image, images, mountPath, pullPolicy, mediaTypes, subPath, readOnly, scratch, scratchSize, exec"},
	{"field twice", serverKey, entry("exec: true", "exec: false"), `[0]: key "exec" is there twice`, "keep one"},
	{"field twice in JSON", serverKey, `[{"image": "a", "mountPath": "/a", "mountPath": "/b"}]`, `[0]: key "mountPath" is there twice`, "keep one"},

	{"image null", serverKey, entry("image: null"), "[0].image: is null, not a string", "write a string, in quotes if need be"},
	{"image empty", serverKey, entry("image: ''"), "[0].image: is empty", "give it a value or remove it"},
	{"image a number", serverKey, entry("image: 1.5"), "[0].image: is the number 1.5, not a string", "write a string, in quotes if need be"},
	{"image in capitals", serverKey, entry("image: example.com/LLaMA"), `[0].image: "example.com/LLaMA": invalid reference format: repository name must be lowercase`, "write REGISTRY/NAME:TAG or REGISTRY/NAME@DIGEST"},
	{"short digest", serverKey, entry("image: 'llama@sha256:12'"), `[0].image: "llama@sha256:12": invalid reference format`, "write REGISTRY/NAME:TAG or REGISTRY/NAME@DIGEST"},
	{"transport", serverKey, entry("image: 'docker://example.com/llama'"), `[0].image: "docker://example.com/llama" has a transport`, "write the name alone, without ...://"},
	{"space around the image", serverKey, entry("image: 'llama '"), `[0].image: "llama " has space around it`, "remove it"},
	{"newline in the image", serverKey, entry(`image: "llama\n"`), `[0].image: "llama\n" has control characters`, "remove them"},
	{"option as image", serverKey, entry("image: --all"), `[0].image: "--all": invalid reference format`, "write REGISTRY/NAME:TAG or REGISTRY/NAME@DIGEST"},

	{"mountPath empty", serverKey, entry("mountPath: ''"), "[0].mountPath: is empty", "give it a value or remove it"},
	{"relative", serverKey, entry("mountPath: models"), `[0].mountPath: "models" is relative`, "start it with /"},
	{"root", serverKey, entry("mountPath: /."), `[0].mountPath: "/." is the root of the container`, "choose a directory in it"},
	{"upwards", serverKey, entry("mountPath: /models/../../etc"), `[0].mountPath: "/models/../../etc" has ".." in it`, "write the path without"},
	{"proc", serverKey, entry("mountPath: /proc/self"), `[0].mountPath: "/proc/self" is in /proc, which belongs to the runtime`, "choose another path"},
	{"sys", serverKey, entry("mountPath: //sys"), `[0].mountPath: "//sys" is in /sys, which belongs to the runtime`, "choose another path"},
	{"dev", serverKey, entry("mountPath: /dev/shm"), `[0].mountPath: "/dev/shm" is in /dev, which belongs to the runtime`, "choose another path"},
	{"colon", serverKey, entry("mountPath: '/models:rw'"), `[0].mountPath: "/models:rw" has ":" in it`, "choose another path"},
	{"newline in the path", serverKey, entry(`mountPath: "/mod\nels"`), `[0].mountPath: "/mod\nels" has control characters`, "remove them"},
	{"long path", serverKey, entry("mountPath: " + strings.Repeat("/models", 600)), "has 4096 bytes or more", "shorten it"},
	{"long name in the path", serverKey, entry("mountPath: /" + strings.Repeat("m", 256)), "has a name of more than 255 bytes", "shorten it"},
	{"one path twice", serverKey, "- {image: a, mountPath: /m}\n- {image: b, mountPath: /m/}\n", `[1].mountPath: "/m" is the path of [0] too`, "give each volume a path of its own"},
	{"one in the other", serverKey, "- {image: a, mountPath: /m}\n- {image: b, mountPath: /m/n}\n", `[1].mountPath: "/m/n" is inside "/m" of [0]`, "mount them side by side"},

	{"policy in small letters", serverKey, entry("pullPolicy: never"), `[0].pullPolicy: "never" is not a pull policy`, "did you mean Never?"},
	{"unknown policy", serverKey, entry("pullPolicy: Daily"), `[0].pullPolicy: "Daily" is not a pull policy`, "known are Always, IfNotPresent, Never"},
	{"sub path absolute", serverKey, entry("subPath: /etc"), `[0].subPath: "/etc" is absolute`, "write it without / at its start"},
	{"sub path upwards", serverKey, entry("subPath: a/../../etc"), `[0].subPath: "a/../../etc" has ".." in it`, "write the path without"},
	{"media type as text", serverKey, entry("mediaTypes: '*tar*'"), `[0].mediaTypes: is the string "*tar*", not a list of media types`, "write [TYPE, ...]"},
	{"images beside image", serverKey, entry("images: [{image: a}]", "image: b"), "[0]: has image beside images", "keep one of them"},
	{"sub path beside images", serverKey, "- {images: [{image: a}], subPath: a, mountPath: /a}", "[0].subPath: is beside images", "write it to each of them"},
	{"many images", serverKey, "- {images: [" + strings.Repeat("{image: a}, ", 9) + "], mountPath: /a}", "[0].images: has 9 images", "at most 8 are allowed"},
	{"scratch of a read-only volume", serverKey, entry("scratch: pod"), "[0].scratch: is for what a container writes", "add readOnly: false, or remove it"},
	{"scratch too small", serverKey, entry("readOnly: false", "scratchSize: 1KiB"), `[0].scratchSize: "1KiB" is not between 16MiB and 16TiB`, "choose another size"},
	{"readOnly in quotes", serverKey, entry("readOnly: 'true'"), `[0].readOnly: is the string "true"`, "write true or false, without quotes"},
	{"exec a number", serverKey, entry("exec: 1"), "[0].exec: is the number 1", "write true or false, without quotes"},
}

// keyRefusals are faulty keys. Whom they were meant for cannot be told, so they
// refuse every container of the pod.
var keyRefusals = []struct {
	name, key, fault, fix string
}{
	{"misspelt", domain + "/contianer.server", "unknown key", "did you mean " + serverKey + "?"},
	{"plural", domain + "/pods", "unknown key", "did you mean " + podKey + "?"},
	{"no name", domain + "/container.", `"" is not a container name`, "write " + domain + "/container.NAME"},
	{"impossible name", domain + "/container.Server_1", `"Server_1" is not a container name`, "write " + domain + "/container.NAME"},
	{"other", domain + "/volumes", "unknown key", "known are " + domain + ", " + podKey + " and " + domain + "/container.NAME"},
	{"nothing", domain + "/", "unknown key", "known are " + domain + ", " + podKey + " and " + domain + "/container.NAME"},
}

func many(n int) string {
	var list strings.Builder
	for i := range n {
		fmt.Fprintf(&list, "- {image: llama, mountPath: /m%d}\n", i)
	}
	return list.String()
}

// assertRefused asserts that a container is refused, each time with one error of one
// line, that it is this one, and that the container is not there.
func assertRefused(t *testing.T, n *realnode.Node, pod *realnode.Pod, container, key, fault, fix string) {
	t.Helper()
	var last string
	for range 2 {
		_, err := pod.Create(t.Context(), realnode.ContainerSpec{Name: container})
		require.Error(t, err)
		_, text, found := strings.Cut(err.Error(), "rpc error: code = Unknown desc = ")
		require.True(t, found, "%s", err)
		meta := pod.Config.GetMetadata()
		where := fmt.Sprintf("image volumes of container %s of pod %s/%s: annotation %s: ", container, meta.GetNamespace(), meta.GetName(), key)
		what, found := strings.CutPrefix(text, where)
		assert.True(t, found, "wanted: %s; got: %s", where, text)
		assert.Contains(t, what, fault)
		assert.True(t, strings.HasSuffix(what, "; "+fix), "wanted: %s; got: %s", fix, what)
		assert.NotContains(t, what, "image volume", "one error")
		assert.NotContains(t, what, "\n")
		assert.Less(t, len(what), 600)
		if last != "" {
			assert.Equal(t, last, text, "the same words each time")
		}
		last = text
	}
	list, err := n.Runtime().ListContainers(t.Context(), &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: pod.ID}})
	require.NoError(t, err)
	for _, c := range list.GetContainers() {
		assert.NotEqual(t, container, c.GetMetadata().GetName(), "a container was made")
	}
}

// TestFaultyAnnotations puts every fault on a pod of two containers.
func TestFaultyAnnotations(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	good := entry("image: " + push(t, n, "refusal/good:1", version("one")))
	t.Run("list", func(t *testing.T) {
		for _, tc := range refusals {
			t.Run(tc.name, func(t *testing.T) {
				t.Parallel()
				annotations := map[string]string{tc.key: tc.text, domain + "/container.other": good}
				pod := runPod(t, n, realnode.PodSpec{Namespace: "shop", Annotations: annotations})
				assertRefused(t, n, pod, "server", tc.key, tc.fault, tc.fix)
				other := run(t, pod, realnode.ContainerSpec{Name: "other"})
				assert.Equal(t, "one", sh(t, other, "cat /models/version"))
			})
		}
	})
	t.Run("key", func(t *testing.T) {
		for _, tc := range keyRefusals {
			t.Run(tc.name, func(t *testing.T) {
				t.Parallel()
				pod := runPod(t, n, realnode.PodSpec{Namespace: "shop", Annotations: map[string]string{tc.key: good, serverKey: good}})
				assertRefused(t, n, pod, "server", tc.key, tc.fault, tc.fix)
				assertRefused(t, n, pod, "other", tc.key, tc.fault, tc.fix)
			})
		}
	})
	n.AssertClean(t)
	for request := range requests(t, n) {
		assert.Contains(t, request, "/refusal/good/", "only what is not faulty is pulled")
	}
}

// TestMountPathInUse asks for a volume where the container has a mount already.
func TestMountPathInUse(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := push(t, n, "refusal/occupied:1", version("one"))
	pod := runPod(t, n, realnode.PodSpec{Namespace: "shop", Name: "web-0", Annotations: volumes(t, volume{Image: ref, MountPath: "/models"})})
	for _, path := range []string{"/models", "/models/"} {
		spec := realnode.ContainerSpec{Mounts: []*cri.Mount{{ContainerPath: path, HostPath: t.TempDir()}}}
		assert.Contains(t, refused(t, pod, spec, "something else"), "image volume /models of container main of pod shop/web-0: "+
			"something else is mounted there already; choose another mountPath")
	}
	assert.Equal(t, "one", sh(t, run(t, pod, realnode.ContainerSpec{}), "cat /models/version"))
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}

// TestContainerAnnotations puts the annotation on a container, where CRI-O
// would let it replace that of the pod.
func TestContainerAnnotations(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := push(t, n, "refusal/container:1", version("one"))
	good := volumes(t, volume{Image: ref, MountPath: "/models"})
	for name, tc := range map[string]struct{ pod, container map[string]string }{
		"beside that of the pod":       {good, map[string]string{domain: "[]"}},
		"more specific than the pod's": {good, map[string]string{domain + "/container.main": "[]"}},
		"alone":                        {nil, good},
		"alone, and nothing asked for": {nil, map[string]string{domain: "[]"}},
		"a key that no container has":  {good, map[string]string{domain + "/": ""}},
	} {
		t.Run(name, func(t *testing.T) {
			pod := runPod(t, n, realnode.PodSpec{Namespace: "shop", Annotations: tc.pod})
			text := refused(t, pod, realnode.ContainerSpec{Annotations: tc.container}, "ocihold-guard: ")
			for key := range tc.container {
				assert.Contains(t, text, `ocihold-guard: container main of pod shop/`+pod.Config.GetMetadata().GetName()+`: `+
					`\"`+key+`\" is among the annotations or labels of the container, where it does not count: annotate the pod`)
			}
			other := run(t, pod, realnode.ContainerSpec{Name: "other"})
			if tc.pod != nil {
				assert.Equal(t, "one", sh(t, other, "cat /models/version"))
			}
		})
	}
	n.AssertClean(t)
}
