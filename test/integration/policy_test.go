package integration

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// requests are those that the registry saw since the last ResetCounts, the
// pings of its API aside.
func requests(t testing.TB, n *realnode.Node) map[string]int {
	t.Helper()
	counts, err := n.Proxy().Counts(t.Context())
	require.NoError(t, err)
	delete(counts, "GET /v2/")
	return counts
}

// version are the layers of an image with one file.
func version(text string) []images.Entry {
	return []images.Entry{images.File("version", text, 0o644)}
}

// TestPullPolicyAsksTheRegistry counts what a pod costs the registry whose
// image is on the node already, in the registry's very version.
func TestPullPolicyAsksTheRegistry(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	const none, one = false, true
	for _, tc := range []struct {
		name, tag, policy string
		asks              bool
	}{
		{"default of no tag", "", "", one},
		{"default of latest", ":latest", "", one},
		{"default of another tag", ":1", "", none},
		{"default of a digest", "@", "", none},
		{"default of latest with a digest", ":latest@", "", one},
		{"Always", ":1", "Always", one},
		{"Always of a digest", "@", "Always", one},
		{"IfNotPresent of latest", ":latest", "IfNotPresent", none},
		{"Never", ":latest", "Never", none},
	} {
		t.Run(tc.name, func(t *testing.T) {
			repository := "policy/" + strings.ToLower(strings.ReplaceAll(tc.name, " ", "-"))
			tag, digest := strings.CutSuffix(tc.tag, "@")
			image, err := images.Image(images.Config{}, version(tc.name))
			require.NoError(t, err)
			require.NoError(t, n.Push(t.Context(), repository+tag, image))
			sum, err := image.Digest()
			require.NoError(t, err)
			asked := strings.TrimPrefix(tag, ":")
			if asked == "" {
				asked = "latest"
			}
			ref := repository + tag
			if digest {
				ref += "@" + sum.String()
				asked = sum.String()
			}
			_, err = command(t, n, "ocihold", "pull", n.Ref(ref))
			require.NoError(t, err)
			require.NoError(t, n.Proxy().ResetCounts(t.Context()))

			pod := runPod(t, n, realnode.PodSpec{
				Annotations: volumes(t, volume{Image: n.Ref(ref), MountPath: "/models", PullPolicy: tc.policy}),
			})
			c := run(t, pod, realnode.ContainerSpec{})
			assert.Equal(t, tc.name, sh(t, c, "cat /models/version"))
			want := map[string]int{}
			if tc.asks {
				want["GET /v2/"+repository+"/manifests/"+asked] = 1
			}
			assert.Equal(t, want, requests(t, n))

			// A second container of the pod asks for nothing more.
			run(t, pod, realnode.ContainerSpec{Name: "second"})
			assert.Equal(t, want, requests(t, n))

			// Each restart asks once, where the policy says so.
			require.NoError(t, c.Stop(t.Context()))
			c = run(t, pod, realnode.ContainerSpec{Attempt: 1})
			assert.Equal(t, tc.name, sh(t, c, "cat /models/version"))
			for request := range want {
				want[request]++
			}
			assert.Equal(t, want, requests(t, n))
		})
	}
	n.AssertClean(t)
}

// TestPullPolicyNever never pulls, and takes up what comes another way.
func TestPullPolicyNever(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := push(t, n, "policy/never:latest", version("one"))
	pod := runPod(t, n, realnode.PodSpec{
		Annotations: volumes(t, volume{Image: ref, MountPath: "/models", PullPolicy: "Never"}),
	})
	refusal := refused(t, pod, realnode.ContainerSpec{}, "ErrImageNeverPull")
	assert.Contains(t, refusal, "image volume /models: ErrImageNeverPull: image "+ref+" is not present on the node and pullPolicy is Never; "+
		"pull it to the node or choose IfNotPresent; will be tried again")
	assert.Empty(t, requests(t, n))

	_, err := n.Pull(t.Context(), ref) // by CRI-O, which does not say for whom
	require.NoError(t, err)
	refused(t, pod, realnode.ContainerSpec{}, "trust_present")
	_, err = command(t, n, "ocihold", "pull", ref)
	require.NoError(t, err)
	c := run(t, pod, realnode.ContainerSpec{})
	assert.Equal(t, "one", sh(t, c, "cat /models/version"))
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}

// TestAlwaysFollowsTheTag moves a tag: what runs keeps what it has, whatever is
// created later gets the new image, but with IfNotPresent the old.
func TestAlwaysFollowsTheTag(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := push(t, n, "policy/moving:latest", version("old"))
	always := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: ref, MountPath: "/models"})})
	ifNotPresent := runPod(t, n, realnode.PodSpec{
		Annotations: volumes(t, volume{Image: ref, MountPath: "/models", PullPolicy: "IfNotPresent"}),
	})
	read := func(c *realnode.Container) string { return sh(t, c, "cat /models/version") }
	keeps := run(t, always, realnode.ContainerSpec{Name: "keeps"})
	stopped := run(t, always, realnode.ContainerSpec{Name: "stopped"})
	exits := run(t, always, realnode.ContainerSpec{Name: "exits", Command: []string{"/bin/sh", "-c", "until test -e /end; do sleep 0.05; done"}})
	other := run(t, ifNotPresent, realnode.ContainerSpec{})
	for _, c := range []*realnode.Container{keeps, stopped, exits, other} {
		require.Equal(t, "old", read(c))
	}

	push(t, n, "policy/moving:latest", version("new"))
	require.NoError(t, other.Stop(t.Context()))
	require.NoError(t, stopped.Stop(t.Context()))
	stopped = run(t, always, realnode.ContainerSpec{Name: "stopped", Attempt: 1})
	assert.Equal(t, "new", read(stopped), "restarted with Always")
	assert.Equal(t, "old", read(keeps), "running all the time")
	assert.Equal(t, "old", read(exits), "running all the time")
	other = run(t, ifNotPresent, realnode.ContainerSpec{Attempt: 1})
	assert.Equal(t, "old", read(other), "restarted with IfNotPresent while the pod has it")

	// A container that ends of itself is restarted likewise.
	push(t, n, "policy/moving:latest", version("newest"))
	sh(t, exits, "touch /end")
	require.Eventually(t, func() bool {
		status, err := exits.Status(t.Context())
		return err == nil && status.GetState() == cri.ContainerState_CONTAINER_EXITED
	}, 20*time.Second, 20*time.Millisecond)
	exits = run(t, always, realnode.ContainerSpec{Name: "exits", Attempt: 1})
	assert.Equal(t, "newest", read(exits), "restarted with Always")
	assert.Equal(t, "new", read(stopped), "running all the time")
	assert.Equal(t, "old", read(keeps), "running all the time")

	// Three images under one name are held, each as long as one has it.
	leases, err := n.Leases()
	require.NoError(t, err)
	assert.Len(t, leases, 3)
	require.NoError(t, stopped.Remove(t.Context()))
	require.NoError(t, keeps.Remove(t.Context()))
	require.NoError(t, ifNotPresent.Remove(t.Context()))
	require.Eventually(t, func() bool {
		leases, err = n.Leases()
		return err == nil && len(leases) == 1
	}, 20*time.Second, 50*time.Millisecond, "the images that no container has are let go")
	assert.Equal(t, "newest", read(exits))
	require.NoError(t, always.Remove(t.Context()))
	n.AssertClean(t)
}

// TestPullsShareOneTransfer runs many pods that all need one absent image: it
// costs the registry no more than one does.
func TestPullsShareOneTransfer(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := push(t, n, "policy/shared:1", []images.Entry{images.Big("big", 8<<20, 1)}, version("one"))
	annotations := volumes(t, volume{Image: ref, MountPath: "/models"})
	var pods []*realnode.Pod
	for range count(8, 100) {
		pods = append(pods, runPod(t, n, realnode.PodSpec{Annotations: annotations}))
	}
	for _, pod := range pods {
		create(t, pod, realnode.ContainerSpec{})
	}
	counts := requests(t, n)
	assert.Len(t, counts, 4, "a manifest, a config, two layers")
	assert.Equal(t, []int{1}, slices.Compact(slices.Collect(maps.Values(counts))), "%v", counts)
	for _, pod := range pods {
		require.NoError(t, pod.Remove(t.Context()))
	}
	n.AssertClean(t)
}
