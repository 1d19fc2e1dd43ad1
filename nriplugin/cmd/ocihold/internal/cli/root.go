// Package cli is ocihold's command line: one file for each command, and the
// one place that puts the parts together.
package cli

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/ocihold/ocihold/conf"
)

// app is what the commands have in common.
type app struct {
	configFile string
	out, err   io.Writer
}

// Execute runs one command line and writes to the given streams. Its error is
// for people; the command has written nothing of it.
func Execute(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	a := &app{out: stdout, err: stderr}
	root := &cobra.Command{
		Use:           "ocihold",
		Short:         "Image volumes for CRI-O nodes",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		RunE:          help,
	}
	root.PersistentFlags().StringVar(&a.configFile, "config", conf.DefaultFile, "configuration `file`; *.toml files in FILE.d add to it")
	root.AddCommand(a.runCommand(), a.statusCommand(), a.pullCommand(), a.importCommand(), a.imagesCommand(), a.removeCommand(),
		a.diskUseCommand(), a.gcCommand(),
		a.volumesCommand(), a.checkCommand(), a.configCommand(), a.versionCommand())
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	return root.ExecuteContext(ctx)
}

// load reads the configuration that the command line names.
func (a *app) load(cmd *cobra.Command) (conf.Config, error) {
	config, err := conf.Load(a.configFile, cmd.Flags().Changed("config"))
	if err != nil {
		return conf.Config{}, fmt.Errorf("read configuration: %w", err)
	}
	return config, nil
}

// loadCRIO reads CRI-O's configuration too.
func (a *app) loadCRIO(cmd *cobra.Command) (conf.Config, *conf.CRIO, error) {
	config, err := a.load(cmd)
	if err != nil {
		return conf.Config{}, nil, err
	}
	crio, err := conf.ReadCRIO(config.CRIO.Config, config.CRIO.ConfigDir)
	if err != nil {
		return conf.Config{}, nil, fmt.Errorf("read CRI-O's configuration: %w", err)
	}
	return config, crio, nil
}

// help is what a command does that only has commands below it.
func help(cmd *cobra.Command, _ []string) error { return cmd.Help() }
