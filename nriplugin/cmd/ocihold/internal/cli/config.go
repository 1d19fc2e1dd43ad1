package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/ocihold/ocihold/conf"
)

func (a *app) configCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Print or check the configuration, and print or install what CRI-O has to be told",
		Args:  cobra.NoArgs,
		RunE:  help,
	}
	cmd.AddCommand(a.configShowCommand(), a.configValidateCommand(), a.configCRIOCommand(), a.configHookCommand())
	return cmd
}

func (a *app) configShowCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "show",
		Short: "Print the configuration with all files and defaults merged",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, err := a.load(cmd)
			if err != nil {
				return err
			}
			return a.print(config.Text())
		},
	}
}

func (a *app) configValidateCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "validate [FILE]",
		Short: "Check a configuration, by itself and against CRI-O's",
		Long: "Check the configuration, or another FILE with its drop-ins, by itself and against CRI-O's, and say all that is wrong.\n" +
			"A running daemon is not asked.",
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				if err := cmd.Flags().Set("config", args[0]); err != nil {
					return err
				}
			}
			config, crio, err := a.loadCRIO(cmd)
			if err != nil {
				return err
			}
			if err := config.ValidateHandlers(crio); err != nil {
				return fmt.Errorf("check handlers against CRI-O's configuration: %w", err)
			}
			fmt.Fprintf(a.out, "%s is valid.\n", a.configFile)
			return nil
		},
	}
}

func (a *app) configCRIOCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "crio",
		Short: "Print or install the drop-in for crio.conf.d",
		Long: "Print the drop-in for crio.conf.d: handlers' roots as additional image stores, NRI on, internal_repair off, and the\n" +
			"hook's directory. With --write, make the handlers' roots first, install it, and tell what must be restarted. A\n" +
			"handler that was taken out of the configuration stays until nothing needs its root any more.",
		Args: cobra.NoArgs,
	}
	write := cmd.Flags().Bool("write", false, "install the drop-in instead of printing it")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		config, crio, err := a.loadCRIO(cmd)
		if err != nil {
			return err
		}
		if err := config.ValidateHandlers(crio); err != nil {
			return fmt.Errorf("check handlers against CRI-O's configuration: %w", err)
		}
		bare, err := bareCRIO(cmd.Context(), config, crio)
		if err != nil {
			return fmt.Errorf("read CRI-O's configuration: %w", err)
		}
		if *write {
			return a.installDropIn(cmd.Context(), config, crio, bare)
		}
		return a.print(conf.DropIn(config, bare))
	}
	return cmd
}

func (a *app) configHookCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "hook",
		Short: "Print or install the OCI hook file",
		Args:  cobra.NoArgs,
	}
	write := cmd.Flags().Bool("write", false, "install the file instead of printing it")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *write {
			config, crio, err := a.loadCRIO(cmd)
			if err != nil {
				return err
			}
			return a.installHook(config, crio)
		}
		config, err := a.load(cmd)
		if err != nil {
			return err
		}
		return a.print(conf.HookFile(config))
	}
	return cmd
}

func (a *app) installHook(config conf.Config, crio *conf.CRIO) error {
	text, err := conf.HookFile(config)
	if err != nil {
		return err
	}
	file := hookFile(config, crio)
	changed, err := install(file, text, filepath.Dir(file))
	if err != nil {
		return fmt.Errorf("install the hook file: %w", err)
	}
	if !changed {
		fmt.Fprintf(a.out, "%s is up to date.\n", file)
		return nil
	}
	fmt.Fprintf(a.out, "Wrote %s. CRI-O takes it up by itself if it reads this directory already; see 'ocihold check'.\n", file)
	return nil
}

func (a *app) print(text []byte, err error) error {
	if err != nil {
		return err
	}
	if _, err := a.out.Write(text); err != nil {
		return fmt.Errorf("write answer: %w", err)
	}
	return nil
}

// install makes text the content of a file, whole or not at all, and returns
// whether it was not before. Until then it is in tempDir, on the same file
// system.
func install(file string, text []byte, tempDir string) (changed bool, err error) {
	have, err := os.ReadFile(file)
	if err == nil && bytes.Equal(have, text) {
		return false, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	dir := filepath.Dir(file)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return false, err
	}
	temp, err := os.CreateTemp(tempDir, ".ocihold-*")
	if err != nil {
		return false, err
	}
	_, err = temp.Write(text)
	err = errors.Join(err, temp.Chmod(0o644))
	if err == nil {
		err = temp.Sync()
	}
	if err = errors.Join(err, temp.Close()); err == nil {
		err = os.Rename(temp.Name(), file)
	}
	if err != nil {
		return false, errors.Join(err, os.Remove(temp.Name()))
	}
	parent, err := os.Open(dir)
	if err != nil {
		return true, err
	}
	return true, errors.Join(parent.Sync(), parent.Close())
}
