package integration

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// BenchmarkLargeArtifact pulls an artifact of one file of 2 GB, and says how
// much memory ocihold had at most and how often it wrote the bytes to disk.
func BenchmarkLargeArtifact(b *testing.B) {
	const size = 2_000_000_000
	n := bootForBench(b, realnode.Options{})
	ref := pushLarge(b, n, "bench/artifact:1", size)
	pid := n.PID(b, realnode.Ocihold)
	for b.Loop() {
		before, began := procField(b, pid, "io", "write_bytes:"), time.Now()
		pulled, err := n.OciholdImages().PullImage(b.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}})
		require.NoError(b, err)
		took := time.Since(began)
		// What a child has written counts once it has ended.
		written := procField(b, pid, "io", "write_bytes:") - before
		b.ReportMetric(float64(written)/size, "writes/byte")
		b.ReportMetric(float64(procField(b, pid, "status", "VmHWM:"))/1000, "peak-MB")
		b.ReportMetric(size/1e6/took.Seconds(), "MB/s")
		require.NoError(b, removeFrom(b, n, "", pulled.GetImageRef()))
	}
}

// pushLarge pushes an artifact with one file of that size.
func pushLarge(b *testing.B, n *realnode.Node, ref string, size int64) string {
	b.Helper()
	content := images.Big("weights", size, 1).Content
	sum, err := digest.FromReader(content())
	require.NoError(b, err)
	repository, err := remote.NewRepository(n.Ref(ref))
	require.NoError(b, err)
	repository.PlainHTTP = true
	repository.Client = &auth.Client{Client: &http.Client{Transport: n.RegistryTransport()}}
	blob := ispec.Descriptor{
		MediaType: "application/vnd.cncf.model.weight.v1.raw", Digest: sum, Size: size,
		Annotations: map[string]string{ispec.AnnotationTitle: "weights"},
	}
	manifest, err := json.Marshal(ispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ispec.MediaTypeImageManifest,
		ArtifactType: "application/vnd.test", Config: ispec.DescriptorEmptyJSON, Layers: []ispec.Descriptor{blob},
	})
	require.NoError(b, err)
	require.NoError(b, repository.Push(b.Context(), blob, io.NopCloser(content())))
	require.NoError(b, repository.Push(b.Context(), ispec.DescriptorEmptyJSON, bytes.NewReader(ispec.DescriptorEmptyJSON.Data)))
	described := descriptor(ispec.MediaTypeImageManifest, manifest, nil)
	require.NoError(b, repository.PushReference(b.Context(), described, bytes.NewReader(manifest), repository.Reference.Reference))
	return n.Ref(ref)
}

// procField reads a number of a process.
func procField(t testing.TB, pid int, file, field string) (value int64) {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/%s", pid, file))
	require.NoError(t, err)
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), field); ok {
			_, err := fmt.Sscan(rest, &value)
			require.NoError(t, err)
			return value
		}
	}
	require.Failf(t, "no such field", "%s of /proc/%d/%s", field, pid, file)
	return 0
}
