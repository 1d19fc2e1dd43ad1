package integration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"oras.land/oras-go/v2"
	"oras.land/oras-go/v2/content/file"
	"oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// artifact is one in the node's registry, and what its volume has.
type artifact struct {
	ref    string
	digest digest.Digest
	files  map[string]string
}

// pushWithORAS pushes files and directories as `oras push` does. more are blobs
// that are no files of oras's.
func pushWithORAS(t testing.TB, n *realnode.Node, ref string, pack oras.PackManifestOptions, dir string, names map[string]string, more ...ispec.Descriptor) artifact {
	t.Helper()
	store, err := file.New(dir)
	require.NoError(t, err)
	defer func() { require.NoError(t, store.Close()) }()
	for _, name := range slices.Sorted(maps.Keys(names)) {
		desc, err := store.Add(t.Context(), name, names[name], "")
		require.NoError(t, err)
		pack.Layers = append(pack.Layers, desc)
	}
	for _, desc := range append(more, configOf(pack)...) {
		require.NoError(t, store.Push(t.Context(), desc, bytes.NewReader(desc.Data)))
	}
	for _, desc := range more {
		desc.Data = nil
		pack.Layers = append(pack.Layers, desc)
	}
	manifest, err := oras.PackManifest(t.Context(), store, oras.PackManifestVersion1_1, "application/vnd.test", pack)
	require.NoError(t, err)
	require.NoError(t, store.Tag(t.Context(), manifest, "1"))
	repository, err := remote.NewRepository(n.Ref(ref))
	require.NoError(t, err)
	repository.PlainHTTP = true
	repository.Client = &auth.Client{Client: &http.Client{Transport: n.RegistryTransport()}}
	_, err = oras.Copy(t.Context(), store, "1", repository, repository.Reference.Reference, oras.DefaultCopyOptions)
	require.NoError(t, err)
	return artifact{ref: n.Ref(ref), digest: manifest.Digest}
}

// configOf is the config that a manifest is packed with, if it is not the empty
// one.
func configOf(pack oras.PackManifestOptions) []ispec.Descriptor {
	if pack.ConfigDescriptor == nil {
		return nil
	}
	return []ispec.Descriptor{*pack.ConfigDescriptor}
}

// descriptor describes content, which it has with it.
func descriptor(mediaType string, content []byte, annotations map[string]string) ispec.Descriptor {
	return ispec.Descriptor{
		MediaType: mediaType, Digest: digest.FromBytes(content), Size: int64(len(content)), Annotations: annotations, Data: content,
	}
}

// artifacts pushes some of each kind.
func artifacts(t testing.TB, n *realnode.Node) map[string]artifact {
	t.Helper()
	dir := t.TempDir()
	write := func(name, content string) {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
	}
	write("rules.json", "{}\n")
	write("bin/data", strings.Repeat("some data\n", 1<<15))
	write("tree/a/b", "b\n")
	write("tree/c", "c\n")
	pushed := map[string]artifact{}

	plain := pushWithORAS(t, n, "artifact/oras:1", oras.PackManifestOptions{}, dir,
		map[string]string{"rules.json": "", "bin/data": "", "tree": ""},
		descriptor("application/octet-stream", []byte("untitled"), nil))
	plain.files = map[string]string{
		"rules.json": "{}\n", "bin/data": strings.Repeat("some data\n", 1<<15), "tree/a/b": "b\n", "tree/c": "c\n",
		"sha256-" + digest.FromString("untitled").Encoded(): "untitled",
	}
	pushed["oras"] = plain

	var chart bytes.Buffer
	files := []images.Entry{images.File("app/Chart.yaml", "apiVersion: v2\nname: app\nversion: 1.0.0\n", 0o644), images.File("app/templates/pod.yaml", "kind: Pod\n", 0o644)}
	packed, err := images.Image(images.Config{Packing: images.Gzip}, files)
	require.NoError(t, err)
	layers, err := packed.Layers()
	require.NoError(t, err)
	compressed, err := layers[0].Compressed()
	require.NoError(t, err)
	_, err = chart.ReadFrom(compressed)
	require.NoError(t, err)
	helmConfig := descriptor("application/vnd.cncf.helm.config.v1+json", []byte(`{"name":"app","version":"1.0.0","apiVersion":"v2"}`), nil)
	helm := pushWithORAS(t, n, "artifact/helm:1.0.0", oras.PackManifestOptions{ConfigDescriptor: &helmConfig}, dir, nil,
		descriptor("application/vnd.cncf.helm.chart.content.v1.tar+gzip", chart.Bytes(), nil))
	helm.files = map[string]string{"app/Chart.yaml": "apiVersion: v2\nname: app\nversion: 1.0.0\n", "app/templates/pod.yaml": "kind: Pod\n"}
	pushed["Helm chart"] = helm

	weights := strings.Repeat("0123456789abcdef", 1<<16)
	noted := func(path string, mode int) map[string]string {
		note, err := json.Marshal(map[string]any{
			"name": filepath.Base(path), "mode": mode, "uid": 1000, "gid": 1000, "mtime": "2025-03-15T14:30:00Z", "typeflag": '0',
		})
		require.NoError(t, err)
		return map[string]string{
			"org.cncf.model.filepath": path, "org.cncf.model.file.metadata+json": string(note), "org.cncf.model.file.mediatype.untested": "false",
		}
	}
	modelConfig := descriptor("application/vnd.cncf.model.config.v1+json", []byte(`{"descriptor":{"name":"tiny"}}`), nil)
	model := pushWithORAS(t, n, "artifact/model:1", oras.PackManifestOptions{ConfigDescriptor: &modelConfig}, dir, nil,
		descriptor("application/vnd.cncf.model.weight.v1.raw", []byte(weights), noted("weights/model-1.safetensors", 0o600)),
		descriptor("application/vnd.cncf.model.weight.config.v1.raw", []byte("{}"), noted("config.json", 0o640)),
		descriptor("application/vnd.cncf.model.code.v1.tar+gzip", chart.Bytes(), noted("app", 0o755)))
	model.files = map[string]string{
		"weights/model-1.safetensors": weights, "config.json": "{}", "app/Chart.yaml": helm.files["app/Chart.yaml"],
		"app/templates/pod.yaml": "kind: Pod\n",
	}
	pushed["ModelPack model"] = model
	return pushed
}

// assertFiles compares what is in a container below a path.
func assertFiles(t testing.TB, c *realnode.Container, path string, want map[string]string) {
	t.Helper()
	root := filepath.Join(rootOf(t, c), path)
	got := map[string]string{}
	require.NoError(t, filepath.Walk(root, func(file string, info os.FileInfo, err error) error {
		if err != nil || !info.Mode().IsRegular() {
			return err
		}
		content, err := os.ReadFile(file)
		name, _ := filepath.Rel(root, file)
		got[name] = string(content)
		return err
	}))
	assert.Equal(t, want, got)
}

// TestArtifacts has artifacts as volumes, by annotation and by Kubernetes' own
// field, and looks at them with the tools of a node.
func TestArtifacts(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	for name, a := range artifacts(t, n) {
		t.Run(name, func(t *testing.T) {
			before := layersOf(t, n.CRIORoot())
			for _, handler := range []string{"", "vm"} {
				pod := runPod(t, n, realnode.PodSpec{Handler: handler, Annotations: volumes(t, volume{Image: a.ref, MountPath: "/volume"})})
				c := run(t, pod, realnode.ContainerSpec{})
				assertFiles(t, c, "volume", a.files)
				listed, err := ociholdCommand(t, n, "volumes", "-o", "json")
				require.NoError(t, err)
				assert.Contains(t, listed, a.digest.String())
				if name == "ModelPack model" {
					assert.Equal(t, "600 1742049000 0:0\n", sh(t, c, "stat -c '%a %Y %u:%g' /volume/weights/model-1.safetensors"))
				}
				require.NoError(t, pod.Remove(t.Context()))
			}
			n.AssertClean(t)

			pulled, err := n.OciholdImages().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: a.ref}})
			require.NoError(t, err)
			id := pulled.GetImageRef()
			mount := native(a.ref, "/volume", "")
			mount.Image.Image = id // as kubelet has it from the pull
			pod, c := runNative(t, n, mount)
			assertFiles(t, c, "volume", a.files)
			settleNative(t, n, id)
			for _, tool := range []string{"crictl rmi " + a.ref, "podman rmi " + id} {
				_, err := command(t, n, "sh", "-c", tool)
				require.Error(t, err, "it is used")
			}
			require.NoError(t, pod.Remove(t.Context()))
			settleNative(t, n)

			testTools(t, n, a, id, before)
		})
	}
	n.AssertClean(t)
}

// testTools looks at an image that was made of an artifact, and removes it.
func testTools(t *testing.T, n *realnode.Node, a artifact, id string, before []string) {
	repository := a.ref[:strings.LastIndex(a.ref, ":")]
	tool := func(args ...string) string {
		out, err := command(t, n, args[0], args[1:]...)
		require.NoError(t, err)
		return out
	}
	for name, service := range map[string]cri.ImageServiceClient{"CRI-O": n.Images(), "ocihold": n.OciholdImages()} {
		assert.True(t, listed(t, service, a.ref), "%s lists it", name)
	}
	assert.Contains(t, tool("crictl", "images", "--digests"), id[:13])
	assert.Contains(t, tool("crictl", "inspecti", a.ref), a.digest.String())
	assert.Contains(t, tool("crictl", "inspecti", repository+"@"+a.digest.String()), id)
	assert.Contains(t, tool("podman", "images", "--no-trunc", "--digests"), "sha256:"+id)
	inspected := tool("podman", "inspect", "--type", "image", id)
	assert.Contains(t, inspected, a.digest.String())
	assert.Contains(t, tool("podman", "history", id), "B")
	assert.Contains(t, tool("skopeo", "inspect", "--raw", fmt.Sprintf("containers-storage:%s@%s", repository, a.digest)), "application/vnd.test",
		"the manifest of the artifact")
	assert.Contains(t, tool("ocihold", "--config", n.OciholdConf(), "images"), repository)
	tool("podman", "rmi", a.ref)
	assert.NotContains(t, tool("podman", "images", "--no-trunc"), id)

	_, err := n.OciholdImages().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: a.ref}})
	require.NoError(t, err)
	tool("crictl", "rmi", a.ref)
	require.NoError(t, removeFrom(t, n, "vm", a.ref))
	assertAbsent(t, n, a.ref)
	assert.Equal(t, before, layersOf(t, n.CRIORoot()))
}

// TestMediaTypes has the configuration say what becomes of blobs.
func TestMediaTypes(t *testing.T) {
	settings := filepath.Join(t.TempDir(), "types.toml")
	require.NoError(t, os.WriteFile(settings, []byte("[media_types]\n\"application/vnd.test.*\" = \"tar\"\n\"application/vnd.test.kept*\" = \"file\"\n"), 0o600))
	n := realnode.Boot(t, realnode.Options{OciholdConf: settings})
	packed, err := images.Image(images.Config{Packing: images.Zstd}, version("1"))
	require.NoError(t, err)
	layers, err := packed.Layers()
	require.NoError(t, err)
	compressed, err := layers[0].Compressed()
	require.NoError(t, err)
	var archive bytes.Buffer
	_, err = archive.ReadFrom(compressed)
	require.NoError(t, err)
	pushed := func(ref string, blobs ...images.Blob) string {
		content, err := images.Artifact("application/vnd.test", blobs...)
		require.NoError(t, err)
		require.NoError(t, n.Push(t.Context(), ref, content))
		return n.Ref(ref)
	}
	ref := pushed("types:1",
		images.Blob{MediaType: "application/vnd.test.bundle", Content: archive.Bytes()},
		images.Blob{MediaType: "application/vnd.test.kept.tar", Title: "kept.tar", Content: archive.Bytes()})
	pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: ref, MountPath: "/volume"})})
	assertFiles(t, run(t, pod, realnode.ContainerSpec{}), "volume", map[string]string{"version": "1", "kept.tar": archive.String()})
	require.NoError(t, pod.Remove(t.Context()))

	no := pushed("types:2", images.Blob{MediaType: "application/vnd.test.bundle", Content: []byte("no archive")})
	pod = runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: no, MountPath: "/volume"})})
	refused(t, pod, realnode.ContainerSpec{}, `its media type "application/vnd.test.bundle" is that of an archive`)
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}
