// Command oracle prints, as JSON, what CRI-O's own packages make of its
// configuration: the outcome of a crio.conf and a drop-in directory, or, with
// -hooks, the OCI hooks that a container gets.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"

	"github.com/containers/common/pkg/hooks"
	"github.com/cri-o/cri-o/pkg/config"
	rspec "github.com/opencontainers/runtime-spec/specs-go"
)

func main() {
	hooksDir := flag.String("hooks", "", "print the hooks of `DIR` for the annotations on standard input, a JSON object")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: oracle CRIO.CONF CRIO.CONF.D\n       oracle -hooks DIR <ANNOTATIONS")
	}
	flag.Parse()
	var answer any
	var err error
	switch {
	case *hooksDir != "" && flag.NArg() == 0:
		answer, err = readHooks(*hooksDir)
	case *hooksDir == "" && flag.NArg() == 2:
		answer, err = readConfig(flag.Arg(0), flag.Arg(1))
	default:
		flag.Usage()
		os.Exit(2)
	}
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(answer)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// readConfig reads file, unless its name is empty, and dir in the order of
// crio's main, and validates as far as that changes values without touching
// the host. Runtime programs are looked up.
func readConfig(file, dir string) (*config.Config, error) {
	c, err := config.DefaultConfig()
	if err != nil {
		return nil, fmt.Errorf("make default config: %w", err)
	}
	if file != "" {
		if err := c.UpdateFromFile(context.Background(), file); err != nil {
			return nil, fmt.Errorf("read %s: %w", file, err)
		}
	}
	if err := c.UpdateFromPath(context.Background(), dir); err != nil {
		return nil, fmt.Errorf("read %s: %w", dir, err)
	}
	if err := c.Validate(false); err != nil {
		return nil, fmt.Errorf("validate: %w", err)
	}
	if err := c.ValidateRuntimes(); err != nil {
		return nil, fmt.Errorf("validate runtimes: %w", err)
	}
	return c, nil
}

func readHooks(dir string) (*rspec.Hooks, error) {
	var annotations map[string]string
	if err := json.NewDecoder(os.Stdin).Decode(&annotations); err != nil {
		return nil, fmt.Errorf("read annotations: %w", err)
	}
	manager, err := hooks.New(context.Background(), []string{dir}, []string{})
	if err != nil {
		return nil, fmt.Errorf("read hooks of %s: %w", dir, err)
	}
	spec := &rspec.Spec{}
	if _, err := manager.Hooks(spec, annotations, false); err != nil {
		return nil, fmt.Errorf("match hooks: %w", err)
	}
	return spec.Hooks, nil
}
