// Package guard decides, as an OCI hook of the stage createRuntime, whether a
// container has the image volumes that its pod's annotations ask for.
//
// CRI-O starts a container without its volumes when the NRI plugin is absent,
// slow or dead. The guard makes that fail closed: whatever it cannot read or
// understand refuses the container, and so does each volume that is not there.
//
// A volume is there when the bundle's config.json has it, and when the mounts
// of the container process do not say otherwise:
//
//   - The last mount of the bundle at or over the volume's path is a bind mount
//     of what is directly in the daemon's mount directory, DIR/KEY, with ro, or
//     rw where the volume asks for it, nosuid and nodev, and with noexec unless it
//     asks for exec.
//   - If the process of the hook's state already has mounts in the root file
//     system of the container, as with runc and crun, the path resolved in it
//     leads to an overlay with the same options, and to the very directory or
//     file that is at DIR/KEY. If it has none, as with runtimes that mount in a
//     virtual machine, the bundle decides.
//
// What is asked for is read from the pod's annotations alone, by the same code
// as in the daemon. CRI-O writes them into the container's annotations, where
// those of the container itself, and its labels, would replace them; so a
// container that has a key of the domain of its own is refused. The annotation
// in which the daemon reports what it gave is not read: a pod can write it.
package guard

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"strings"
	"unicode"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/ocihold/ocihold/imagevolume/request"
)

// maxState bounds the hook's input, in bytes. It holds the annotations of the
// container, some of them twice and escaped.
const maxState = 16 << 20

// Run is the hook: it reads the OCI state from stdin and returns nil when the
// container may start, else an error of one line that says what is missing and
// what to do.
func Run(args []string, stdin io.Reader) error {
	err := run(args, stdin)
	if err != nil && strings.ContainsFunc(err.Error(), unicode.IsControl) {
		return errors.New(strconv.Quote(err.Error()))
	}
	return err
}

func run(args []string, stdin io.Reader) error {
	flags := flag.NewFlagSet("ocihold-guard", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	dir := flags.String("mounts", "", "")
	switch err := flags.Parse(args); {
	case err != nil:
		return fmt.Errorf("%w; usage: ocihold-guard --mounts DIR, with the OCI state on stdin", err)
	case flags.NArg() > 0, !filepath.IsAbs(*dir), filepath.Clean(*dir) == "/":
		return errors.New("usage: ocihold-guard --mounts DIR, with the OCI state on stdin")
	}
	state, err := readState(stdin)
	if err != nil {
		return fmt.Errorf("read the OCI state: %w", err)
	}
	bundle, err := readBundle(state.Bundle)
	if err != nil {
		return fmt.Errorf("read the bundle of container %s: %w", state.ID, err)
	}
	wanted, err := bundle.wanted()
	if err != nil || len(wanted) == 0 {
		return err
	}
	given := make([]volume, len(wanted))
	for i, w := range wanted {
		mount, err := bundle.injected(w, filepath.Clean(*dir))
		if err != nil {
			return bundle.refuse(w, err)
		}
		given[i] = volume{w, mount}
	}
	return bundle.checkProcess(state.Pid, given)
}

func readState(stdin io.Reader) (specs.State, error) {
	var state specs.State
	text, err := io.ReadAll(io.LimitReader(stdin, maxState+1))
	switch {
	case err != nil:
		return state, err
	case len(text) > maxState:
		return state, fmt.Errorf("it has more than %d bytes", maxState)
	}
	return state, json.Unmarshal(text, &state)
}

// volume is a requested volume and the path of the daemon's mount for it.
type volume struct {
	request.Volume
	source string
}
