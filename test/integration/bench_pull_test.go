package integration

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// BenchmarkPull compares the pull of an absent image by ocihold, into CRI-O's
// root and into a handler's, with CRI-O's own and with skopeo copy, in turns.
func BenchmarkPull(b *testing.B) {
	var large, small [][]images.Entry
	for i := range 4 {
		large = append(large, []images.Entry{images.Big(fmt.Sprintf("blob%d", i), 64<<20, uint64(i))})
	}
	for i := range 60 {
		var files []images.Entry
		for j := range 20 {
			files = append(files, images.Big(fmt.Sprintf("layer%d/file%d", i, j), 16<<10, uint64(100*i+j)))
		}
		small = append(small, files)
	}
	b.Run("4x64MiB", func(b *testing.B) { benchmarkPull(b, large) })
	b.Run("60x320KiB", func(b *testing.B) { benchmarkPull(b, small) })
}

func benchmarkPull(b *testing.B, layers [][]images.Entry) {
	const rounds = 9
	n := bootForBench(b, realnode.Options{HandlerRoots: true})
	ref := push(b, n, "bench/pull:1", layers...)

	pull := func(images cri.ImageServiceClient, handler string) func() {
		spec := &cri.ImageSpec{Image: ref, RuntimeHandler: handler}
		return func() {
			_, err := images.PullImage(b.Context(), &cri.PullImageRequest{Image: spec})
			require.NoError(b, err)
		}
	}
	remove := func(images cri.ImageServiceClient, handler string) func() {
		spec := &cri.ImageSpec{Image: ref, RuntimeHandler: handler}
		return func() {
			_, err := images.RemoveImage(b.Context(), &cri.RemoveImageRequest{Image: spec})
			require.NoError(b, err)
		}
	}
	stored := fmt.Sprintf("containers-storage:[overlay@%s+%s]%s",
		filepath.Join(n.Dir(), "lib", "skopeo"), filepath.Join(n.Dir(), "run", "skopeo"), ref)
	skopeo := func(args ...string) func() {
		return func() {
			_, err := command(b, n, "skopeo", args...)
			require.NoError(b, err)
		}
	}
	ways := []struct {
		name          string
		pull, cleanUp func()
	}{
		{"ours", pull(n.OciholdImages(), ""), remove(n.OciholdImages(), "")},
		{"handler", pull(n.OciholdImages(), "vm"), remove(n.OciholdImages(), "vm")},
		{"crio", pull(n.Images(), ""), remove(n.Images(), "")},
		{"skopeo", skopeo("copy", "-q", "--src-tls-verify=false", "docker://"+ref, stored), skopeo("delete", stored)},
	}
	for b.Loop() {
		took := map[string][]time.Duration{}
		for round := range rounds {
			for i := range ways {
				way := ways[(i+round)%len(ways)]
				began := time.Now()
				way.pull()
				took[way.name] = append(took[way.name], time.Since(began))
				way.cleanUp()
			}
		}
		median := func(way string) float64 {
			slices.Sort(took[way])
			return float64(quantile(took[way], 0.5).Microseconds()) / 1000
		}
		for _, way := range ways {
			b.ReportMetric(median(way.name), way.name+"-ms")
		}
		b.ReportMetric(median("ours")/median("crio"), "ours/crio")
		b.ReportMetric(median("handler")/median("crio"), "handler/crio")
		b.ReportMetric(median("ours")/median("skopeo"), "ours/skopeo")
	}
}
