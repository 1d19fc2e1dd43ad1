package integration

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// bootForBench boots a node, in a new directory, for the time of the benchmark.
func bootForBench(b *testing.B, o realnode.Options) *realnode.Node {
	b.Helper()
	dir, err := os.MkdirTemp("", "bench")
	require.NoError(b, err)
	o.Dir = filepath.Join(dir, "n")
	n, err := realnode.Up(b.Context(), o)
	require.NoError(b, err)
	b.Cleanup(func() {
		require.NoError(b, n.Down(context.WithoutCancel(b.Context())))
		require.NoError(b, os.RemoveAll(dir))
	})
	return n
}

// benchNode boots a node with an image of ten layers.
func benchNode(b *testing.B) (n *realnode.Node, image string) {
	b.Helper()
	n = bootForBench(b, realnode.Options{OciholdConf: settings(b, "log_level = \"debug\"\n")})
	image = push(b, n, "bench:1", images.Stack(10)...)
	_, err := n.Pull(b.Context(), image)
	require.NoError(b, err)
	return n, image
}

var answered = regexp.MustCompile(`container is answered.*took=("?)([0-9.µmns]+)`)

// answers reads the times of the plugin's answers from ocihold's log.
func answers(b *testing.B, n *realnode.Node) []time.Duration {
	b.Helper()
	file, err := os.Open(n.LogFile(realnode.Ocihold))
	require.NoError(b, err)
	defer file.Close()
	var all []time.Duration
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if m := answered.FindStringSubmatch(lines.Text()); m != nil {
			took, err := time.ParseDuration(m[2])
			require.NoError(b, err)
			all = append(all, took)
		}
	}
	return all
}

func quantile(sorted []time.Duration, q float64) time.Duration {
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// histogram draws the times in powers of two.
func histogram(times []time.Duration) string {
	var out strings.Builder
	for low, high := time.Duration(0), 32*time.Microsecond; ; low, high = high, 2*high {
		within := 0
		for _, t := range times {
			if t >= low && t < high {
				within++
			}
		}
		fmt.Fprintf(&out, "  under %7s %4d %s\n", high, within, strings.Repeat("#", 60*within/len(times)))
		if high > times[len(times)-1] {
			return out.String()
		}
	}
}

// BenchmarkHandlerAnswer shows how long the plugin takes to answer for a
// container whose volume is present, while 200 containers with volumes run.
func BenchmarkHandlerAnswer(b *testing.B) {
	const pods, each = 20, 10
	n, image := benchNode(b)
	for b.Loop() {
		for range pods {
			pod := runPod(b, n, realnode.PodSpec{Annotations: volumes(b, volume{Image: image, MountPath: "/v"})})
			for i := range each {
				run(b, pod, realnode.ContainerSpec{Name: fmt.Sprintf("c%d", i)})
			}
		}
		before := len(answers(b, n))
		pod := runPod(b, n, realnode.PodSpec{Annotations: volumes(b, volume{Image: image, MountPath: "/v"})})
		for i := range 100 {
			run(b, pod, realnode.ContainerSpec{Name: fmt.Sprintf("c%d", i)})
		}
		times := answers(b, n)[before:]
		slices.Sort(times)
		b.Logf("%d answers with %d containers on the node:\n%s", len(times), pods*each, histogram(times))
		b.ReportMetric(float64(quantile(times, 0.5).Microseconds()), "p50-µs")
		b.ReportMetric(float64(quantile(times, 0.99).Microseconds()), "p99-µs")
	}
}

// BenchmarkContainerStart compares the creation and start of a container with
// an image volume of ours, with a native one of CRI-O, and with none, in turns.
func BenchmarkContainerStart(b *testing.B) {
	const rounds = 30
	n, image := benchNode(b)
	ours := runPod(b, n, realnode.PodSpec{Annotations: volumes(b, volume{Image: image, MountPath: "/v"})})
	plain := runPod(b, n, realnode.PodSpec{})
	native := []*cri.Mount{{ContainerPath: "/v", Readonly: true, Image: &cri.ImageSpec{Image: image, UserSpecifiedImage: image}}}
	kinds := []struct {
		name string
		pod  *realnode.Pod
		spec realnode.ContainerSpec
	}{
		{"none", plain, realnode.ContainerSpec{Name: "none"}},
		{"ours", ours, realnode.ContainerSpec{Name: "ours"}},
		{"native", plain, realnode.ContainerSpec{Name: "native", Mounts: native}},
	}
	for b.Loop() {
		took := map[string][]time.Duration{}
		for round := range rounds {
			for _, k := range kinds {
				k.spec.Attempt = uint32(round)
				if round == 0 {
					create(b, k.pod, k.spec) // the image is pulled, leased and mounted by then
					continue
				}
				began := time.Now()
				run(b, k.pod, k.spec)
				took[k.name] = append(took[k.name], time.Since(began))
			}
		}
		median := func(kind string) float64 {
			slices.Sort(took[kind])
			return float64(quantile(took[kind], 0.5).Microseconds()) / 1000
		}
		b.ReportMetric(median("none"), "none-ms")
		b.ReportMetric(median("ours"), "ours-ms")
		b.ReportMetric(median("native"), "native-ms")
		b.ReportMetric(median("ours")/median("native"), "ours/native")
		b.ReportMetric(median("ours")/median("none"), "ours/none")
	}
}
