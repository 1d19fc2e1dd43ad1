package cli

import (
	"fmt"
	"io"
	"os"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/sys/unix"

	"github.com/ocihold/ocihold/storage"
)

func (a *app) pullCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pull IMAGE",
		Short: "Pull an image into a handler's root",
		Long: "Pull an image into the root of a runtime handler and for its platform, with the registries, credentials and\n" +
			"signature policy that CRI-O is configured with, or the handler, where it has its own. Without --handler it is the\n" +
			"handler that a route gives for the image, or CRI-O's own root. Prints the image ID; progress goes to standard error, as a bar on a terminal and as lines elsewhere.\n" +
			"Works without the daemon, too.",
		Args: cobra.ExactArgs(1),
	}
	output := outputFlag(cmd)
	handler := handlerFlag(cmd, "pull for this runtime handler")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		config, crio, err := a.loadCRIO(cmd)
		if err != nil {
			return err
		}
		return a.ask(cmd.Context(), config, crio, func(store imageStore) error {
			return a.follow(args[0], *output, func(show func(storage.Progress)) (storage.Image, error) {
				return store.Pull(cmd.Context(), *handler, args[0], show)
			})
		})
	}
	return cmd
}

// follow shows the progress of what brings an image, and prints the image.
func (a *app) follow(what string, output format, bring func(show func(storage.Progress)) (storage.Image, error)) error {
	show, done := showProgress(a.err, what)
	image, err := bring(show)
	done(err == nil)
	if err != nil {
		return err
	}
	if output == "json" {
		return writeJSON(a.out, image)
	}
	fmt.Fprintln(a.out, image.ID)
	return nil
}

func handlerFlag(cmd *cobra.Command, usage string) *string {
	return cmd.Flags().String("handler", "", usage)
}

// showProgress returns what shows a pull's progress on w, and what ends it.
func showProgress(w io.Writer, ref string) (show func(storage.Progress), done func(ok bool)) {
	if isTerminal(w) {
		return showBar(w, ref)
	}
	return showLines(w, ref)
}

func isTerminal(w io.Writer) bool {
	file, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
	return err == nil
}

func showBar(w io.Writer, ref string) (func(storage.Progress), func(bool)) {
	bars := mpb.New(mpb.WithOutput(w), mpb.WithWidth(40))
	bar := bars.AddBar(0,
		mpb.PrependDecorators(decor.Name(ref+" ")),
		mpb.AppendDecorators(decor.CountersKibiByte("% .1f / % .1f"), decor.Name(" "), decor.AverageSpeed(decor.SizeB1024(0), "% .1f")))
	show := func(p storage.Progress) {
		bar.SetTotal(p.Total, false)
		bar.SetCurrent(p.Done)
	}
	done := func(ok bool) {
		if ok {
			bar.SetTotal(-1, true)
		} else {
			bar.Abort(false)
		}
		bars.Wait()
	}
	return show, done
}

// showLines prints a line for each tenth.
func showLines(w io.Writer, ref string) (func(storage.Progress), func(bool)) {
	last := int64(-1)
	show := func(p storage.Progress) {
		if p.Total <= 0 {
			return
		}
		if tenth := 10 * p.Done / p.Total; tenth != last {
			last = tenth
			fmt.Fprintf(w, "%s: %d%% of %s\n", ref, 10*tenth, units.HumanSize(float64(p.Total)))
		}
	}
	return show, func(bool) {}
}
