package integration

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// TestReports finds which digest a container was given in all places that say so,
// after the image's name has come to mean another.
func TestReports(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	pushed := func(ref, text string) (name, digest string) {
		t.Helper()
		image, err := images.Image(images.Config{}, []images.Entry{images.File("file", text, 0o644)})
		require.NoError(t, err)
		require.NoError(t, n.Push(t.Context(), ref, image))
		hash, err := image.Digest()
		require.NoError(t, err)
		return n.Ref(ref), hash.String()
	}
	model, digest := pushed("model:1", "one")
	tool, toolDigest := pushed("tool:1", "tool")
	_, err := n.Pull(t.Context(), tool)
	require.NoError(t, err)
	pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: model, MountPath: "/model", PullPolicy: "Always"})})
	c := run(t, pod, realnode.ContainerSpec{Mounts: []*cri.Mount{native(tool, "/tool", "")}})
	pushed("model:1", "two")

	type status struct {
		Container, MountPath, Image, ImageID, Digest string
		Native                                       bool
	}
	var list []status
	check := func(t *testing.T) {
		t.Helper()
		out, err := ociholdCommand(t, n, "volumes", "-o", "json")
		require.NoError(t, err)
		list = nil
		require.NoError(t, json.Unmarshal([]byte(out), &list))
		require.Len(t, list, 2)
		assert.Equal(t, status{"main", "/model", model, list[0].ImageID, digest, false}, list[0])
		assert.Equal(t, status{"main", "/tool", tool, list[1].ImageID, toolDigest, true}, list[1])
		out, err = ociholdCommand(t, n, "volumes")
		require.NoError(t, err)
		assert.Contains(t, out, digest)
		assert.Contains(t, out, toolDigest)
	}
	check(t)

	info, err := c.Info(t.Context())
	require.NoError(t, err)
	report := info.RuntimeSpec.Annotations["ocihold.dev/volumes"]
	assert.JSONEq(t, `[{"mountPath":"/model","image":"`+model+`","imageID":"`+list[0].ImageID+`","digest":"`+digest+`"}]`, report)

	var lines []string
	for line := range strings.Lines(logOf(t, n, realnode.Ocihold)) {
		if strings.Contains(line, "container is given image volumes") {
			lines = append(lines, line)
		}
	}
	require.Len(t, lines, 1)
	for _, said := range []string{
		"namespace=default", "pod=" + pod.Config.GetMetadata().GetName(), "container=main", "id=" + c.ID, digest, "/model", model,
		"/tool=" + list[1].ImageID,
	} {
		assert.Contains(t, lines[0], said)
	}

	t.Run("after a restart", func(t *testing.T) {
		require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, 9))
		require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
		awaitRegistered(t, n)
		await(t, func() error { // its images are looked for
			out, err := ociholdCommand(t, n, "volumes")
			if err == nil && (!strings.Contains(out, digest) || !strings.Contains(out, toolDigest)) {
				err = fmt.Errorf("ocihold volumes says: %s", out)
			}
			return err
		})
		check(t)
	})
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}
