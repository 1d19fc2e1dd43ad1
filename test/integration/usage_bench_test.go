package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/stretchr/testify/require"
	cstorage "go.podman.io/storage"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/realnode"
)

// BenchmarkImageFsInfo times ImageFsInfo with 300 images of 3,000 layers in
// CRI-O's root, beside CRI-O's own, which counts no layers: the first answer,
// the first of a new process, and the median after that.
func BenchmarkImageFsInfo(b *testing.B) {
	n := bootForBench(b, realnode.Options{})
	began := time.Now()
	writeImages(b, n, 300, 10)
	b.Logf("written in %s", time.Since(began))

	ask := func(service cri.ImageServiceClient) time.Duration {
		began := time.Now()
		_, err := service.ImageFsInfo(b.Context(), &cri.ImageFsInfoRequest{})
		require.NoError(b, err)
		return time.Since(began)
	}
	milliseconds := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	for b.Loop() {
		b.ReportMetric(milliseconds(ask(n.OciholdImages())), "first-ms")
		began := time.Now()
		_, err := ociholdCommand(b, n, "df")
		require.NoError(b, err)
		b.ReportMetric(milliseconds(time.Since(began)), "df-ms")
		require.NoError(b, n.Kill(b.Context(), realnode.Ocihold, unix.SIGTERM))
		require.NoError(b, n.Start(b.Context(), realnode.Ocihold))
		b.ReportMetric(milliseconds(ask(n.OciholdImages())), "restart-ms")
		var ours, theirs []time.Duration
		for range 50 {
			ours = append(ours, ask(n.OciholdImages()))
			theirs = append(theirs, ask(n.Images()))
		}
		slices.Sort(ours)
		slices.Sort(theirs)
		b.ReportMetric(milliseconds(quantile(ours, 0.5)), "ours-ms")
		b.ReportMetric(milliseconds(quantile(theirs, 0.5)), "crio-ms")
		b.ReportMetric(float64(quantile(ours, 0.5))/float64(quantile(theirs, 0.5)), "ours/crio")
	}
}

// writeImages writes images into CRI-O's root, each of as many layers of its
// own, with 20 files in each layer.
func writeImages(b *testing.B, n *realnode.Node, images, layers int) {
	b.Helper()
	store, err := cstorage.GetStore(cstorage.StoreOptions{
		GraphRoot: n.CRIORoot(), RunRoot: n.CRIORunRoot(), GraphDriverName: "overlay",
		GraphDriverOptions: []string{"overlay.skip_mount_home=true"},
	})
	require.NoError(b, err)
	defer store.Free()
	content := []byte(strings.Repeat("x", 6000))
	for i := range images {
		top := ""
		for range layers {
			layer, err := store.CreateLayer("", top, nil, "", false, &cstorage.LayerOptions{
				IDMappingOptions: cstorage.LayerIDMappingOptions{HostUIDMapping: true, HostGIDMapping: true},
			})
			require.NoError(b, err)
			for f := range 20 {
				require.NoError(b, os.WriteFile(filepath.Join(n.CRIORoot(), "overlay", layer.ID, "diff", fmt.Sprint(f)), content, 0o600))
			}
			top = layer.ID
		}
		config := fmt.Appendf(nil, `{"os":"linux","author":"%d"}`, i)
		configDigest := digest.FromBytes(config)
		manifest := fmt.Appendf(nil, `{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{`+
			`"mediaType":"application/vnd.oci.image.config.v1+json","digest":%q,"size":%d},"layers":[]}`, configDigest, len(config))
		_, err := store.CreateImage(configDigest.Encoded(), []string{fmt.Sprintf("bench.example/image%d:1", i)}, top, "{}", &cstorage.ImageOptions{
			BigData: []cstorage.ImageBigDataOption{
				{Key: cstorage.ImageDigestBigDataKey, Data: manifest, Digest: digest.FromBytes(manifest)},
				{Key: configDigest.String(), Data: config, Digest: configDigest},
			},
		})
		require.NoError(b, err)
	}
}
