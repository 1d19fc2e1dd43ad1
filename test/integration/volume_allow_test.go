package integration

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// TestAllowedVolumes limits what pods may have as volumes: what is refused is
// refused before a layer is asked for, and where it is on the node, too.
func TestAllowedVolumes(t *testing.T) {
	conf := filepath.Join(t.TempDir(), "allow.toml")
	const limits = "[volumes]\nallowed_images = [\"127.0.0.1:*/models/**\"]\nallowed_namespaces = [\"team-*\"]\nmax_image_bytes = \"1MB\"\n"
	require.NoError(t, os.WriteFile(conf, []byte(limits), 0o644))
	n := realnode.Boot(t, realnode.Options{OciholdConf: conf})
	file := []images.Entry{images.File("file", "content\n", 0o644)}
	model, other := push(t, n, "models/small:1", file), push(t, n, "other/small:1", append(file, images.File("other", "", 0o644)))
	large := push(t, n, "models/large:1", []images.Entry{images.Big("file", 1<<20, 1)})

	podWith := func(t *testing.T, namespace, ref, policy string) *realnode.Pod {
		t.Helper()
		return runPod(t, n, realnode.PodSpec{Namespace: namespace, Annotations: volumes(t, volume{Image: ref, MountPath: "/vol", PullPolicy: policy})})
	}
	reads := func(t *testing.T, ref, policy string) *realnode.Container {
		t.Helper()
		c := run(t, podWith(t, "team-a", ref, policy), realnode.ContainerSpec{})
		require.Equal(t, "content\n", sh(t, c, "cat /vol/file"))
		return c
	}
	refusedFor := func(t *testing.T, namespace, ref, policy, setting string) {
		t.Helper()
		require.NoError(t, n.Proxy().ResetCounts(t.Context()))
		pod := podWith(t, namespace, ref, policy)
		text := refused(t, pod, realnode.ContainerSpec{}, setting)
		assert.Contains(t, text, "image volume /vol of container main of pod "+namespace+"/"+pod.Config.GetMetadata().GetName()+
			": annotation image-volume.ocihold.dev: ")
		assert.Contains(t, text, "not allowed on this node")
		for request := range requests(t, n) {
			assert.NotContains(t, request, "/blobs/")
		}
	}
	check := func(t *testing.T, policies ...string) {
		t.Helper()
		for _, policy := range policies {
			refusedFor(t, "team-a", other, policy, "image "+other)
			refusedFor(t, "default", model, policy, "namespace default is not among allowed_namespaces in [volumes]")
			refusedFor(t, "team-a", large, policy, "max_image_bytes in [volumes]: ")
		}
	}

	t.Run("not on the node", func(t *testing.T) {
		check(t, "Always", "IfNotPresent")
		for _, ref := range []string{other, large} {
			_, err := command(t, n, "crictl", "inspecti", ref)
			require.Error(t, err)
		}
		reads(t, model, "Always")
	})
	t.Run("on the node", func(t *testing.T) {
		for _, ref := range []string{model, other, large} { // which is not limited
			out, err := ociholdCommand(t, n, "pull", ref)
			require.NoError(t, err, out)
		}
		check(t, "Always", "IfNotPresent", "Never")
		for _, policy := range []string{"Always", "IfNotPresent", "Never"} {
			reads(t, model, policy)
		}
		list := presentIDs(t, n, model, other, large)
		reads(t, list[0], "Never")
		refusedFor(t, "team-a", list[1], "Never", "image "+list[1])
		refusedFor(t, "team-a", list[2], "IfNotPresent", "max_image_bytes in [volumes]: ")
	})
	t.Run("a change of the settings", func(t *testing.T) {
		pod := podWith(t, "team-a", model, "IfNotPresent")
		c := run(t, pod, realnode.ContainerSpec{})
		restartWith(t, n, "[volumes]\nallowed_images = [\"127.0.0.1:*/other/*\"]\n")
		refused(t, pod, realnode.ContainerSpec{Name: "second"}, "allowed_images in [volumes]")
		wakeSettling(t, n)
		require.Equal(t, "content\n", sh(t, c, "cat /vol/file"))
		_, err := command(t, n, "crictl", "rmi", model)
		require.ErrorContains(t, err, "in use")
		restartWith(t, n, "[volumes]\nallowed_images = []\nallowed_namespaces = []\nmax_image_bytes = \"0\"\n")
		require.Equal(t, "content\n", sh(t, run(t, pod, realnode.ContainerSpec{Name: "second"}), "cat /vol/file"))
		for _, ref := range []string{other, large} {
			run(t, podWith(t, "default", ref, "IfNotPresent"), realnode.ContainerSpec{})
		}
	})
	n.AssertClean(t)
}

// presentIDs returns the ids of images that are on the node.
func presentIDs(t testing.TB, n *realnode.Node, refs ...string) []string {
	t.Helper()
	ids := make([]string, len(refs))
	for i, ref := range refs {
		out, err := command(t, n, "crictl", "images", "--quiet", "--no-trunc", ref)
		require.NoError(t, err)
		ids[i] = strings.TrimPrefix(strings.TrimSpace(out), "sha256:")
	}
	return ids
}
