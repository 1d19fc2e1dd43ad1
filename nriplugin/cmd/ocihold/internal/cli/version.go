package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// Version is set at build time (-ldflags -X); else the module's is taken.
var Version string

func version() string {
	if Version != "" {
		return Version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "devel"
}

func (a *app) versionCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
	}
	output := outputFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		if *output == "json" {
			return writeJSON(a.out, map[string]string{"version": version(), "go": runtime.Version()})
		}
		fmt.Fprintf(a.out, "ocihold %s (%s)\n", version(), runtime.Version())
		return nil
	}
	return cmd
}
