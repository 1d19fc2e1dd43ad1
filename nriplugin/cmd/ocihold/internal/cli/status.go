package cli

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/control"
)

func (a *app) statusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Tell whether the daemon runs and is registered with CRI-O",
		Long:  "Tell whether the daemon runs and is registered with CRI-O. The exit status is 0 only if it is.",
		Args:  cobra.NoArgs,
	}
	output := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		config, err := a.load(cmd)
		if err != nil {
			return err
		}
		status, err := control.NewClient(controlSocket(config)).Status(cmd.Context())
		if err != nil {
			return err
		}
		if *output == "json" {
			err = writeJSON(a.out, status)
		} else {
			err = writeTable(a.out, [][]string{
				{"VERSION", "REGISTERED"}, {status.Version, fmt.Sprint(status.Registered)},
			})
		}
		if err == nil && !status.Registered {
			err = errors.New("not registered with CRI-O: is it running, with NRI enabled?")
		}
		return err
	}
	return cmd
}
