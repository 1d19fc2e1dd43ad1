package guard

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The guard runs for every container of a pod with volumes, so it stays a few
// megabytes that start in a few milliseconds.
func TestImportsStayLight(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".").Output()
	require.NoError(t, err)
	require.ElementsMatch(t, []string{
		"github.com/docker/go-units",
		"github.com/moby/sys/mountinfo",
		"github.com/ocihold/ocihold/imagevolume/request",
		"github.com/ocihold/ocihold/nriplugin/cmd/ocihold-guard/internal/guard",
		"github.com/opencontainers/go-digest",
		"github.com/opencontainers/runtime-spec/specs-go",
		"go.podman.io/image/v5/docker/reference",
		"go.podman.io/storage/pkg/regexp",
		"go.yaml.in/yaml/v3",
		"golang.org/x/sys/unix",
	}, strings.Fields(string(out)))
}
