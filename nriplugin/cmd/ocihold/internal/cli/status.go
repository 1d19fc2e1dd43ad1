package cli

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/control"
)

func (a *app) statusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Tell whether the daemon runs and is registered with CRI-O, and how it is",
		Long: "Tell whether the daemon runs and is registered with CRI-O, and how its parts, the roots and the last sweeps are. The exit\n" +
			"status is 0 only if it is registered and alive and CRI-O's root answers.",
		Args: cobra.NoArgs,
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
			err = writeTable(a.out, statusTable(status))
		}
		if err == nil && !status.Ready {
			err = errors.New(strings.Join(status.Lines(), "; "))
		}
		return err
	}
	return cmd
}

func statusTable(status control.Status) [][]string {
	rows := [][]string{{"VERSION", "REGISTERED", "READY"}, {status.Version, fmt.Sprint(status.Registered), fmt.Sprint(status.Ready)}}
	rows = append(rows, []string{"", "", ""}, []string{"PART", "STATE", "SINCE"})
	row := func(name, fault, when string) {
		if fault == "" {
			fault = "ok"
		}
		rows = append(rows, []string{name, fault, when})
	}
	for _, p := range status.Parts {
		row(p.Name, p.Fault, "")
	}
	for _, r := range status.Roots {
		row("root of handler "+r.Handler, r.Fault, "")
	}
	for _, s := range status.Sweeps {
		if s.At.IsZero() {
			row(s.Name, "not yet", "")
		} else {
			row(s.Name, s.Fault, time.Since(s.At).Truncate(time.Second).String()+" ago")
		}
	}
	return rows
}
